// GPT-2 as published (Radford et al. 2019): pre-norm blocks, learned positions, tanh GELU, a head tied to the token
// embedding, weights drawn from N(0, 0.02) with residual projections scaled by 1 / sqrt(2 L). No word of parallelism.
#pragma once
#include <string>
#include <vector>

#include "nn/layers.h"

namespace tessera {

struct GptConfig {
  int64_t layers = 4, heads = 4, channels = 128, context = 64, vocab = 256;
  double dropout = 0;
  Recompute recompute = Recompute::none;
  bool tied = true;  // the head is the token embedding; otherwise it has a copy of its weight (Parameter::tie)
};

// x + attention(norm(x)), then + mlp(norm(.)): (B, T, C) -> (B, T, C).
class Block : public Module {
 public:
  explicit Block(const GptConfig& c);
  Var forward(const Var& x) override;
  Tensor decode(const Tensor& x, KvCache& cache);

  LayerNorm& norm1;
  Attention& attn;
  LayerNorm& norm2;
  Mlp& mlp;
  Dropout &drop1, &drop2;

 private:
  Var body(const Var& x);
  Recompute recompute_;
};

class Gpt : public Module {
 public:
  // Shapes only: call materialize() before the first forward pass.
  explicit Gpt(const GptConfig& c);

  Var embed(const Tensor& ids);   // int32 (B, T), T <= context -> (B, T, C), what the first block sees
  Var hidden(const Tensor& ids);  // int32 (B, T) -> (B, T, C), after the last norm
  Var logits(const Var& hidden);  // (B, T, C) -> (B T, V)
  // ids and targets int32 (B, T); `scale` as in cross_entropy().
  Loss loss(const Tensor& ids, const Tensor& targets, double scale);
  // The same of what hidden() gives, without the logits in memory where they are large; targets of any shape.
  Loss head_loss(const Var& hidden, const Tensor& targets, double scale);

  // Decoding without gradients: logits (B, V) of the token that follows the last of `ids` (B, T), which stand after the
  // tokens already in the caches.
  std::vector<KvCache> caches(int64_t batch);
  Tensor decode(const Tensor& ids, std::vector<KvCache>& caches);

  const GptConfig config;
  Embedding &tokens, &positions;
  Dropout& drop;
  std::vector<Block*> blocks;
  LayerNorm& norm;
  Embedding& head;  // maybe `tokens`

 private:
  std::vector<Block*> make_blocks();
  Embedding& make_head();
  Var look_up(const Tensor& ids, const Tensor& places);
};

}  // namespace tessera
