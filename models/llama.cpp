#include "models/llama.h"

#include <string>

namespace tessera {

LlamaBlock::LlamaBlock(const ModelConfig& c, std::shared_ptr<Rotary> rotary)
    : norm1(child<RMSNorm>("norm1", c.channels, c.recompute, c.norm_eps)),
      attn(child<Attention>("attn", c.channels,
                            Attention::Options{.heads = c.heads,
                                               .kv_heads = c.kv_heads,
                                               .head_dim = c.head_dim,
                                               .projection_deviation = c.residual_deviation(),
                                               .qkv_bias = c.qkv_bias,
                                               .projection_bias = false,
                                               .rotary = std::move(rotary),
                                               .norm_eps = c.qk_norm ? std::optional(c.norm_eps) : std::nullopt})),
      norm2(child<RMSNorm>("norm2", c.channels, c.recompute, c.norm_eps)),
      mlp(child<GatedMlp>("mlp", c.channels, c.hidden(), c.residual_deviation(), c.recompute)) {}

Var LlamaBlock::forward(const Var& x) {
  auto [residual, normed] = norm2.add(x, attn(norm1(x)));
  return add(residual, mlp(normed));
}

Tensor LlamaBlock::decode(const Tensor& x, KvCache& cache) {
  const NoGrad no_grad;
  auto [residual, normed] = norm2.add(Var(x), Var(attn.decode(norm1(Var(x)).value(), cache)));
  return add(residual, mlp(normed)).value();
}

Llama::Llama(const ModelConfig& c)
    : LanguageModel(c),
      tokens(child<Embedding>("tokens", c.vocab, c.channels)),
      blocks(make_blocks()),
      norm(child<RMSNorm>("norm", c.channels, Recompute::none, c.norm_eps)),
      head(make_head(tokens)) {}

std::vector<LlamaBlock*> Llama::make_blocks() {
  const auto rotary = std::make_shared<Rotary>(config.context, config.head_size(), config.rotary);
  std::vector<LlamaBlock*> made;
  for (int64_t i = 0; i < config.layers; ++i)
    made.push_back(&child<LlamaBlock>("blocks." + std::to_string(i), config, rotary));
  return made;
}

}  // namespace tessera
