// Llama (Touvron et al. 2023, arXiv 2302.13971; Grattafiori et al. 2024, arXiv 2407.21783) and what is built like it:
// Mistral, Qwen2 (biases of q, k and v) and Qwen3 (norms of q and k). RMSNorm, rotary positions, SwiGLU, and heads of
// queries that share keys and values; the head is a table of its own unless it is tied. Weights are drawn, and elements
// dropped, as GPT-2's are. No word of parallelism.
#pragma once
#include <vector>

#include "models/block.h"

namespace tessera {

using LlamaBlock = PreNormBlock<RMSNorm, GatedMlp>;

class Llama : public LanguageModel {
 public:
  // Shapes only: call materialize() before the first forward pass.
  explicit Llama(const ModelConfig& c);

  Var embed(const Tensor& ids) override { return drop.apply(tokens.lookup(ids)); }
  DecoderLayer& layer(int64_t i) override { return *blocks[static_cast<size_t>(i)]; }
  Var finish(const Var& x) override { return norm(x); }
  Var logits(const Var& hidden) override { return head.logits(hidden); }
  // Without the logits in memory where they are large.
  Loss head_loss(const Var& hidden, const Tensor& targets, double scale) override {
    return head.loss(hidden, targets.contiguous().reshape({-1}), scale);
  }
  void place(const ModelAxes& axes) override;  // models/llama_layout.cpp

  Embedding& tokens;
  Dropout& drop;
  std::vector<LlamaBlock*> blocks;
  RMSNorm& norm;
  Embedding& head;  // maybe `tokens`

 private:
  std::vector<LlamaBlock*> make_blocks();
};

}  // namespace tessera
