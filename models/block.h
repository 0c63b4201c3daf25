// The decoder layer of GPT-2 and of Llama, with a norm before attention and before the MLP (Xiong et al. 2020, "On
// layer normalization in the transformer architecture"): x + attention(norm(x)), then + mlp(norm(.)), where a mixture
// of experts may stand in place of the MLP.
#pragma once
#include <type_traits>
#include <utility>

#include "models/language_model.h"

namespace tessera {

template <class NormKind, class MlpKind>
class PreNormBlock : public DecoderLayer {
 public:
  PreNormBlock(const ModelConfig& c, const Attention::Options& attention)
      : norm1(child<NormKind>("norm1", c.channels, c.recompute, c.norm_eps)),
        attn(child<Attention>("attn", c.channels, attention)),
        norm2(child<NormKind>("norm2", c.channels, c.recompute, c.norm_eps)),
        mlp(make_mlp(c)),
        drop1(child<Dropout>("drop1", c.dropout)),
        drop2(child<Dropout>("drop2", c.dropout)) {}

  Var forward(const Var& x) override {
    Var branch = drop1.apply(attn(norm1(x)));
    auto [residual, normed] = norm2.add(x, std::move(branch));
    return add_residual(residual, drop2.apply(mlp(normed)));
  }

  Tensor decode(const Tensor& x, std::span<KvCache* const> texts, int64_t answers) override {
    const NoGrad no_grad;
    Var attended(attn.decode(norm1(Var(x)).value(), texts, answers));
    const Tensor in = x.narrow(1, x.dim(1) - answers, answers).contiguous();
    const auto [residual, normed] = norm2.add(Var(in), std::move(attended));
    return add(residual, mlp(normed)).value();
  }

  NormKind& norm1;
  Attention& attn;
  NormKind& norm2;
  Module& mlp;  // MlpKind, or a mixture of experts of this kind
  Dropout &drop1, &drop2;

 private:
  Module& make_mlp(const ModelConfig& c) {
    if (c.experts.count > 0)
      return child<MixtureOfExperts>("mlp", c.channels,
                                     MixtureOfExperts::Options{.hidden = c.hidden(),
                                                               .gated = std::is_same_v<MlpKind, GatedMlp>,
                                                               .down_deviation = c.residual_deviation(),
                                                               .recompute = c.recompute,
                                                               .experts = c.experts});
    return child<MlpKind>("mlp", c.channels, c.hidden(), c.residual_deviation(), c.recompute);
  }
};

}  // namespace tessera
