// The decoder's forward passes.
#include "models/decoder.h"

#include <algorithm>
#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/error.h"
#include "models/families.h"

namespace tessera {
namespace {

NormOptions gradient_norm(const ModelConfig& c) {
  return {.eps = c.norm_eps, .center = find_row(c.family).centered_norms};
}

}  // namespace

DecoderBlock::DecoderBlock(const ModelConfig& c, const Attention::Options& attention)
    : norm1(child<Norm>("norm1", c.channels, gradient_norm(c), c.recompute)),
      attn(child<Attention>("attn", c.channels, attention)),
      norm2(child<Norm>("norm2", c.channels, gradient_norm(c), c.recompute)),
      mlp(make_mlp(c)),
      drop1(child<Dropout>("drop1", c.dropout)),
      drop2(child<Dropout>("drop2", c.dropout)) {}

Module& DecoderBlock::make_mlp(const ModelConfig& c) {
  const FamilyRow& row = find_row(c.family);
  const MlpOptions options{c.residual_deviation(), row.biases || c.mlp_bias, c.activation()};
  if (c.experts.count > 0)
    return child<MixtureOfExperts>("mlp", c.channels, MixtureOfExperts::Options{c.hidden(), options, c.experts});
  if (row.gated) return child<GatedMlp>("mlp", c.channels, c.hidden(), options);
  return child<Mlp>("mlp", c.channels, c.hidden(), options);
}

Var DecoderBlock::forward(const Var& x) {
  Var branch = drop1.apply(attn(norm1(x)));
  auto [residual, normed] = norm2.add(x, std::move(branch));
  return add_residual(residual, drop2.apply(mlp(normed)));
}

Tensor DecoderBlock::decode(const Tensor& x, std::span<KvCache* const> texts, int64_t answers) {
  const NoGrad no_grad;
  Var attended(attn.decode(norm1(Var(x)).value(), texts, answers));
  const Tensor in = x.narrow(1, x.dim(1) - answers, answers).contiguous();
  const auto [residual, normed] = norm2.add(Var(in), std::move(attended));
  return add(residual, mlp(normed)).value();
}

std::vector<DecoderBlock*> Decoder::make_blocks() {
  const ModelConfig& c = config;
  const FamilyRow& row = find_row(c.family);
  Attention::Options attention{.heads = c.heads,
                               .kv_heads = c.kv_heads,
                               .head_dim = c.head_dim,
                               .dropout = c.dropout,
                               .projection_deviation = c.residual_deviation(),
                               .qkv_bias = row.biases || c.qkv_bias,
                               .projection_bias = row.biases || c.proj_bias,
                               .window = c.window < c.context ? c.window : 0,
                               .recompute = c.recompute == Recompute::attention};
  if (row.rotary) attention.rotary = std::make_shared<Rotary>(c.context, c.head_size(), c.rotary);
  if (c.qk_norm) attention.norm_eps = c.norm_eps;
  std::vector<DecoderBlock*> made;
  for (int64_t i = 0; i < c.layers; ++i)
    made.push_back(&child<DecoderBlock>("blocks." + std::to_string(i), c, attention));
  return made;
}

// Throws early, naming the field, for sizes that a layer would reject.
static const ModelConfig& checked(const ModelConfig& c) {
  for (const auto& [field, size] :
       {std::pair("layers", c.layers), std::pair("heads", c.heads), std::pair("channels", c.channels),
        std::pair("context", c.context), std::pair("vocab", c.vocab)})
    expect_at_least(1, field, size);
  return c;
}

Decoder::Decoder(const ModelConfig& c)
    : LanguageModel(checked(c)),
      tokens(child<Embedding>("tokens", c.vocab, c.channels)),
      positions(find_row(c.family).rotary ? nullptr : &child<Embedding>("positions", c.position_rows(), c.channels)),
      drop(child<Dropout>("drop", c.dropout)),
      blocks(make_blocks()),
      norm(child<Norm>("norm", c.channels, gradient_norm(c), Recompute::none)),
      head(make_head(tokens)) {
  if (c.mlp_bias && c.experts.count > 0)
    throw FieldError("mlp_bias", "experts have no biases; expected false with `experts`");
  if (find_row(c.family).gated && c.gelu != Activation::gelu)
    throw FieldError("gelu", "requires `family` gpt2, got " + std::string(name_in(kFamilyNames, c.family)));
  if (find_row(c.family).rotary && c.positions != 0)
    throw FieldError("positions", "requires `family` gpt2, got " + std::string(name_in(kFamilyNames, c.family)));
  if (find_row(c.family).rotary) return;
  if (c.position_rows() < c.context)
    throw FieldError("positions", "expected at least " + std::to_string(c.context) +
                                      " position embeddings (`context`), got " + std::to_string(c.positions));
  for (const auto& [field, found] : {std::pair{"rope_theta", c.rotary != RotaryOptions()},
                                     {"window", c.window != 0},
                                     {"qkv_bias", c.qkv_bias},
                                     {"proj_bias", c.proj_bias},
                                     {"mlp_bias", c.mlp_bias},
                                     {"qk_norm", c.qk_norm}})
    if (found) throw FieldError(field, "requires `family` llama, got " + std::string(name_in(kFamilyNames, c.family)));
}

Var Decoder::embed(const Tensor& ids) {
  if (!positions) return drop.apply(tokens.lookup(ids));
  if (ids.ndim() != 2) throw Error("[gpt] ids are " + ids.describe() + "; expected int32 (B, T)");
  const StepInfo at = step();
  const int64_t t = ids.dim(1), total = std::max(t, at.tokens_total);
  if (total > config.context)
    throw Error("[gpt] " + std::to_string(total) + " tokens exceed the context length of " +
                std::to_string(config.context));
  const std::vector<int32_t> given(at.positions.begin(), at.positions.end());
  Tensor places = at.documents.positions;
  if (!places.defined())
    places = given.empty() ? Tensor::range(t, ids.arena()) : Tensor::constant<int32_t>(given, {t}, ids.arena());
  return drop.apply(add(positions->lookup(places), tokens.lookup(ids)));
}

}  // namespace tessera
