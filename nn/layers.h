// The layers of a transformer.
#pragma once
#include <utility>

#include "autograd/ops.h"
#include "nn/module.h"

namespace tessera {

// What backward makes again instead of keeping (Chen et al. 2016; Korthikanti et al. 2022, "Reducing activation
// recomputation in large transformer models"). Gradients are bit for bit the same in all four.
enum class Recompute {
  none,
  gelu,       // the output of GELU: 4 C numbers per token less, one elementwise pass more
  gelu_norm,  // and the outputs of both norms: another 2 C
  block,      // everything but the block's input: C are left, one forward pass more
};

enum class Activation { none, gelu };

// y = activation(x w^T + b): (..., in) -> (..., out).
class Linear : public Module {
 public:
  struct Options {
    bool bias = true;
    double deviation = 0.02;  // of the initial weights
    Activation activation = Activation::none;
    Recompute recompute = Recompute::none;
  };
  Linear(int64_t in, int64_t out, const Options& options);
  Var forward(const Var& x) override;

  Var& weight;  // (out, in)
  Var* bias;    // (out), or null

 private:
  Options options_;
  WeightPacks packs_;
};

// LayerNorm over the last dim, with gamma and beta.
class LayerNorm : public Module {
 public:
  explicit LayerNorm(int64_t channels, Recompute recompute = Recompute::none, double eps = 1e-5);
  Var forward(const Var& x) override;
  // {x + y, norm(x + y)} in one pass; y may be written over.
  std::pair<Var, Var> add(const Var& x, Var y);

  Var &weight, &bias;

 private:
  NormOptions options_;
  bool recompute_;
};

// RMSNorm over the last dim, with gamma.
class RMSNorm : public Module {
 public:
  explicit RMSNorm(int64_t channels, Recompute recompute = Recompute::none, double eps = 1e-5);
  Var forward(const Var& x) override;
  std::pair<Var, Var> add(const Var& x, Var y);

  Var& weight;

 private:
  NormOptions options_;
  bool recompute_;
};

class Embedding : public Module {
 public:
  Embedding(int64_t entries, int64_t channels, double deviation = 0.02);
  Var lookup(const Tensor& ids) { return embedding(ids, weight); }  // int32 (...) -> (..., C)

  Var& weight;  // (entries, C)
};

// Drops elements of a (B, T, C) activation while training, by counted randomness: its stream is named after itself.
class Dropout : public Module {
 public:
  explicit Dropout(double p) : p_(p) {}
  Var apply(Var x);  // may write over x
  double p() const { return p_; }

 private:
  double p_;
};

// Keys and values of the tokens so far, for decoding one token after another: (B, capacity, H, D), `length` filled.
struct KvCache {
  Tensor keys, values;
  int64_t length = 0;
};

// Causal self-attention with packed [q | k | v]: (B, T, C) -> (B, T, C). Vaswani et al. 2017, section 3.2.
class Attention : public Module {
 public:
  struct Options {
    int64_t heads = 1;
    double dropout = 0;                  // of the attention probabilities
    double projection_deviation = 0.02;  // of the output projection's initial weights
  };
  Attention(int64_t channels, const Options& options);
  Var forward(const Var& x) override;
  // The same for new tokens (B, T, C) that follow `cache.length` older ones; appends their keys and values. No
  // gradient.
  Tensor decode(const Tensor& x, KvCache& cache);

  Linear &qkv, &proj;

 private:
  AttentionOptions at_step();
  Options options_;
};

// down(gelu(up(x))): (..., C) -> (..., C) with 4 C hidden channels.
class Mlp : public Module {
 public:
  Mlp(int64_t channels, double down_deviation, Recompute recompute);
  Var forward(const Var& x) override { return down(up(x)); }

  Linear &up, &down;
};

}  // namespace tessera
