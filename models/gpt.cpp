// The forward passes of GPT-2.
#include "models/gpt.h"

#include <algorithm>
#include <vector>

namespace tessera {

Block::Block(const ModelConfig& c)
    : norm1(child<LayerNorm>("norm1", c.channels, c.recompute)),
      attn(child<Attention>("attn", c.channels,
                            Attention::Options{.heads = c.heads,
                                               .kv_heads = c.kv_heads,
                                               .head_dim = c.head_dim,
                                               .dropout = c.dropout,
                                               .projection_deviation = c.residual_deviation()})),
      norm2(child<LayerNorm>("norm2", c.channels, c.recompute)),
      mlp(child<Mlp>("mlp", c.channels, c.hidden(), c.residual_deviation(), c.recompute)),
      drop1(child<Dropout>("drop1", c.dropout)),
      drop2(child<Dropout>("drop2", c.dropout)) {}

Var Block::forward(const Var& x) {
  Var branch = drop1.apply(attn(norm1(x)));
  auto [residual, normed] = norm2.add(x, std::move(branch));
  return add(residual, drop2.apply(mlp(normed)));
}

Tensor Block::decode(const Tensor& x, KvCache& cache) {
  const NoGrad no_grad;
  Var attended(attn.decode(norm1(Var(x)).value(), cache));
  const auto [residual, normed] = norm2.add(Var(x), std::move(attended));
  return add(residual, mlp(normed)).value();
}

std::vector<Block*> Gpt::make_blocks() {
  std::vector<Block*> made;
  for (int64_t i = 0; i < config.layers; ++i) made.push_back(&child<Block>("blocks." + std::to_string(i), config));
  return made;
}

Gpt::Gpt(const ModelConfig& c)
    : LanguageModel(c),
      tokens(child<Embedding>("tokens", c.vocab, c.channels)),
      positions(child<Embedding>("positions", c.context, c.channels)),
      drop(child<Dropout>("drop", c.dropout)),
      blocks(make_blocks()),
      norm(child<LayerNorm>("norm", c.channels)),
      head(make_head(tokens)) {}

Var Gpt::embed(const Tensor& ids) {
  if (ids.rank() != 2) throw Error("[gpt] ids are " + ids.describe() + "; expected int32 (B, T)");
  const StepInfo at = step();
  const int64_t t = ids.dim(1), total = std::max(t, at.tokens_total);
  if (total > config.context)
    throw Error("[gpt] " + std::to_string(total) + " tokens; the context is " + std::to_string(config.context));
  const std::vector<int32_t> given(at.positions.begin(), at.positions.end());
  const Tensor places =
      given.empty() ? Tensor::range(t, ids.arena()) : Tensor::constant<int32_t>(given, {t}, ids.arena());
  return drop.apply(add(positions.lookup(places), tokens.lookup(ids)));
}

Var Gpt::logits(const Var& hidden_states) { return head.logits(hidden_states); }

Loss Gpt::head_loss(const Var& hidden_states, const Tensor& targets, double scale) {
  return head.loss(hidden_states, targets.contiguous().reshape({-1}), scale);
}

}  // namespace tessera
