// Sizes of a model from its shape.
#include "planner/model_shape.h"

#include <algorithm>
#include <string>

#include "tensor/error.h"

namespace tessera::planner {

ModelShape shape_of(const ModelConfig& c) {
  if (c.experts.count > 0 && c.experts.shared > 0)
    throw FieldError("shared_experts",
                     "predictions do not know them; expected 0, found " + std::to_string(c.experts.shared));
  const FamilyRow& family = row_of(c.family);
  return {.layers = c.layers,
          .channels = c.channels,
          .heads = c.heads,
          .kv_heads = c.kv_heads,
          .head_dim = c.head_dim,
          .ffn = c.ffn,
          .experts = c.experts.count,
          .experts_per_token = c.experts.count > 0 ? c.experts.per_token : 0,
          .gated = family.gated,
          .vocab = c.vocab,
          .context = c.context,
          .tied = c.tied,
          .positions = family.rotary ? Positions::rope : Positions::learned,
          .qkv_bias = c.qkv_bias,
          .qk_norm = c.qk_norm};
}

double expert_parameters(const ModelShape& m) {
  const double one = (m.gated ? 3 : 2) * static_cast<double>(m.channels) * static_cast<double>(m.hidden());
  return one * static_cast<double>(std::max<int64_t>(1, m.experts));
}

double layer_matrices(const ModelShape& m) {
  const auto h = static_cast<double>(m.channels), q = static_cast<double>(m.query()), k = static_cast<double>(m.key());
  return h * (q + 2 * k) + q * h + expert_parameters(m);
}

double layer_parameters(const ModelShape& m) {
  const auto h = static_cast<double>(m.channels), qkv = static_cast<double>(m.query() + 2 * m.key()),
             f = static_cast<double>(m.hidden());
  double small = m.gated ? 2 * h + (m.qkv_bias ? qkv : 0)
                         : 4 * h + qkv + h + (m.experts > 0 ? 0 : f + h);  // experts have no biases
  if (m.qk_norm) small += 2 * static_cast<double>(m.head_size());
  return layer_matrices(m) + small + h * static_cast<double>(m.experts);  // with the router
}

double parameters(const ModelShape& m) {
  const auto h = static_cast<double>(m.channels), v = static_cast<double>(m.vocab);
  return static_cast<double>(m.layers) * layer_parameters(m) + v * h * (m.tied ? 1 : 2) +
         (m.positions == Positions::learned ? static_cast<double>(m.context) * h : 0) + (m.gated ? 1 : 2) * h;
}

double active_parameters(const ModelShape& m) {
  if (m.experts == 0) return parameters(m);
  const double idle = 1 - static_cast<double>(m.experts_per_token) / static_cast<double>(m.experts);
  return parameters(m) - static_cast<double>(m.layers) * expert_parameters(m) * idle;
}

}  // namespace tessera::planner
