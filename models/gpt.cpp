// The forward passes of GPT-2.
#include "models/gpt.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "tensor/error.h"

namespace tessera {

std::vector<GptBlock*> Gpt::make_blocks() {
  std::vector<GptBlock*> made;
  for (int64_t i = 0; i < config.layers; ++i)
    made.push_back(&child<GptBlock>("blocks." + std::to_string(i), config, config.attention()));
  return made;
}

Gpt::Gpt(const ModelConfig& c)
    : LanguageModel(c),
      tokens(child<Embedding>("tokens", c.vocab, c.channels)),
      positions(child<Embedding>("positions", c.context, c.channels)),
      drop(child<Dropout>("drop", c.dropout)),
      blocks(make_blocks()),
      norm(child<LayerNorm>("norm", c.channels, Recompute::none, c.norm_eps)),
      head(make_head(tokens)) {
  for (const auto& [field, found] :
       {std::pair{"rope_theta", c.rotary != RotaryOptions()}, {"qkv_bias", c.qkv_bias}, {"qk_norm", c.qk_norm}})
    if (found) throw FieldError(field, "goes with `family` llama, found gpt2");
}

Var Gpt::embed(const Tensor& ids) {
  if (ids.rank() != 2) throw Error("[gpt] ids are " + ids.describe() + "; expected int32 (B, T)");
  const StepInfo at = step();
  const int64_t t = ids.dim(1), total = std::max(t, at.tokens_total);
  if (total > config.context)
    throw Error("[gpt] " + std::to_string(total) + " tokens; the context is " + std::to_string(config.context));
  const std::vector<int32_t> given(at.positions.begin(), at.positions.end());
  Tensor places = at.documents.positions;
  if (!places.defined())
    places = given.empty() ? Tensor::range(t, ids.arena()) : Tensor::constant<int32_t>(given, {t}, ids.arena());
  return drop.apply(add(positions.lookup(places), tokens.lookup(ids)));
}

Var Gpt::logits(const Var& hidden_states) { return head.logits(hidden_states); }

Loss Gpt::head_loss(const Var& hidden_states, const Tensor& targets, double scale) {
  return head.loss(hidden_states, targets.contiguous().reshape({-1}), scale);
}

}  // namespace tessera
