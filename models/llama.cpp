// What the layers of a Llama are made of.
#include "models/llama.h"

#include <memory>
#include <optional>
#include <string>

namespace tessera {

Llama::Llama(const ModelConfig& c)
    : LanguageModel(c),
      tokens(child<Embedding>("tokens", c.vocab, c.channels)),
      drop(child<Dropout>("drop", c.dropout)),
      blocks(make_blocks()),
      norm(child<RMSNorm>("norm", c.channels, Recompute::none, c.norm_eps)),
      head(make_head(tokens)) {}

std::vector<LlamaBlock*> Llama::make_blocks() {
  const ModelConfig& c = config;
  Attention::Options attention = c.attention();
  attention.qkv_bias = c.qkv_bias;
  attention.projection_bias = false;
  attention.rotary = std::make_shared<Rotary>(c.context, c.head_size(), c.rotary);
  if (c.qk_norm) attention.norm_eps = c.norm_eps;
  std::vector<LlamaBlock*> made;
  for (int64_t i = 0; i < c.layers; ++i)
    made.push_back(&child<LlamaBlock>("blocks." + std::to_string(i), c, attention));
  return made;
}

}  // namespace tessera
