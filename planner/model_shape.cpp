// Sizes of a model from its shape.
#include "planner/model_shape.h"

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

double layer_parameters(const ModelShape& m) {
  const auto h = static_cast<double>(m.channels), q = static_cast<double>(m.query()), k = static_cast<double>(m.key()),
             f = static_cast<double>(m.hidden()), experts = static_cast<double>(m.experts);
  const double matrices = m.gated ? 3 : 2, feed = matrices * h * f;
  const double attention = h * (q + 2 * k) + q * h;
  const double small =
      m.gated ? 2 * h + (m.qkv_bias ? q + 2 * k : 0) + (m.qk_norm ? 2 * static_cast<double>(m.head_size()) : 0)
              : 4 * h + (q + 2 * k) + h + (m.experts > 0 ? 0 : f + h);
  return attention + small + (m.experts > 0 ? experts * feed + experts * h : feed);
}

double parameters(const ModelShape& m) {
  const auto h = static_cast<double>(m.channels), v = static_cast<double>(m.vocab);
  return static_cast<double>(m.layers) * layer_parameters(m) + v * h * (m.tied ? 1 : 2) +
         (m.positions == Positions::learned ? static_cast<double>(m.context) * h : 0) + (m.gated ? 1 : 2) * h;
}

}  // namespace tessera::planner
