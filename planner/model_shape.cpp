// Sizes of a model from its shape.
#include "planner/model_shape.h"

#include <algorithm>

namespace tessera::planner {

ModelShape shape_of(const ModelConfig& c) {
  const bool llama = c.family == Family::llama;
  return {.layers = c.layers,
          .channels = c.channels,
          .heads = c.heads,
          .kv_heads = c.kv_heads,
          .head_dim = c.head_dim,
          .ffn = c.ffn,
          .gated = llama,
          .vocab = c.vocab,
          .context = c.context,
          .tied = c.tied,
          .positions = llama ? Positions::rope : Positions::learned,
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
  double small = m.gated ? 2 * h + (m.qkv_bias ? qkv : 0) : 4 * h + qkv + h + f + h;
  if (m.qk_norm) small += 2 * static_cast<double>(m.head_size());
  return layer_matrices(m) + small + h * static_cast<double>(m.experts);  // with the router
}

double parameters(const ModelShape& m) {
  const auto h = static_cast<double>(m.channels), v = static_cast<double>(m.vocab);
  return static_cast<double>(m.layers) * layer_parameters(m) + v * h * (m.tied ? 1 : 2) +
         (m.positions == Positions::learned ? static_cast<double>(m.context) * h : 0) + (m.gated ? 1 : 2) * h;
}

}  // namespace tessera::planner
