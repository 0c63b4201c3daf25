// GPT-2 as published (Radford et al. 2019): pre-norm blocks, learned positions, tanh GELU, a head tied to the token
// embedding, weights drawn from N(0, 0.02) with residual projections scaled by 1 / sqrt(2 L). No word of parallelism.
#pragma once
#include <vector>

#include "models/language_model.h"

namespace tessera {

// x + attention(norm(x)), then + mlp(norm(.)): (B, T, C) -> (B, T, C).
class Block : public DecoderLayer {
 public:
  explicit Block(const ModelConfig& c);
  Var forward(const Var& x) override;
  Tensor decode(const Tensor& x, KvCache& cache) override;

  LayerNorm& norm1;
  Attention& attn;
  LayerNorm& norm2;
  Mlp& mlp;
  Dropout &drop1, &drop2;
};

class Gpt : public LanguageModel {
 public:
  // Shapes only: call materialize() before the first forward pass.
  explicit Gpt(const ModelConfig& c);

  Var embed(const Tensor& ids) override;  // T <= context
  DecoderLayer& layer(int64_t i) override { return *blocks[static_cast<size_t>(i)]; }
  Var finish(const Var& x) override { return norm(x); }
  Var logits(const Var& hidden) override;
  // Without the logits in memory where they are large.
  Loss head_loss(const Var& hidden, const Tensor& targets, double scale) override;
  void place(const ModelAxes& axes) override;  // models/gpt_layout.cpp

  Embedding &tokens, &positions;
  Dropout& drop;
  std::vector<Block*> blocks;
  LayerNorm& norm;
  Embedding& head;  // maybe `tokens`

 private:
  std::vector<Block*> make_blocks();
};

}  // namespace tessera
