// The decoder of all families, configured by sizes and by the family's components (models/families.h):
//
//   gpt2    LayerNorm, learned positions, GELU, biases: Radford et al. 2019
//   llama   RMSNorm, rotary positions, SwiGLU: Touvron et al. 2023, arXiv 2302.13971; Grattafiori et al. 2024, arXiv
//           2407.21783; and derived models: Mistral, Qwen2 (biases of q, k and v), Qwen3 (norms of q and k)
//
// Weights are initialized from N(0, 0.02), projections onto the residual stream scaled by 1 / sqrt(2 L).
#pragma once
#include <array>
#include <cstdint>
#include <span>
#include <vector>

#include "models/language_model.h"

namespace tessera {

// A pre-norm block (Xiong et al. 2020, "On layer normalization in the transformer architecture"): x +
// attention(norm(x)), then + mlp(norm(.)).
class DecoderBlock : public DecoderLayer {
 public:
  DecoderBlock(const ModelConfig& c, const Attention::Options& attention);
  Var forward(const Var& x) override;
  Tensor decode(const Tensor& x, std::span<KvCache* const> texts, int64_t answers) override;

  Norm& norm1;
  Attention& attn;
  Norm& norm2;
  Module& mlp;  // Mlp, GatedMlp or MixtureOfExperts
  Dropout &drop1, &drop2;

 private:
  Module& make_mlp(const ModelConfig& c);
};

class Decoder : public LanguageModel {
 public:
  // Meta tensors until materialize(). Throws FieldError for features that the family lacks.
  explicit Decoder(const ModelConfig& c);

  Var embed(const Tensor& ids) override;  // T <= context
  DecoderLayer& layer(int64_t i) override { return *blocks[checked_index("model", "a layer", i, std::ssize(blocks))]; }
  Var finish(const Var& x) override { return norm(x); }
  Var logits(const Var& hidden) override { return head.logits(hidden); }
  // Does not store the logits if they are large.
  Loss head_loss(const Var& hidden, const Tensor& targets, double scale) override {
    return head.loss(hidden, targets.contiguous().reshape({-1}), scale);
  }
  void place(const ModelAxes& axes) override;  // decoder_layout.cpp

  Embedding& tokens;
  Embedding* positions;  // null with rotary positions
  Dropout& drop;
  std::vector<DecoderBlock*> blocks;
  Norm& norm;
  Embedding& head;  // `tokens` if tied

 private:
  std::vector<DecoderBlock*> make_blocks();
};

}  // namespace tessera
