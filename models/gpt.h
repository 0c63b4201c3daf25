// GPT-2 as published (Radford et al. 2019): pre-norm blocks, learned positions, tanh GELU, a head tied to the token
// embedding, weights drawn from N(0, 0.02) with residual projections scaled by 1 / sqrt(2 L). No word of parallelism.
#pragma once
#include <vector>

#include "models/block.h"

namespace tessera {

using GptBlock = PreNormBlock<LayerNorm, Mlp>;

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
  std::vector<GptBlock*> blocks;
  LayerNorm& norm;
  Embedding& head;  // maybe `tokens`

 private:
  std::vector<GptBlock*> make_blocks();
};

}  // namespace tessera
