// Transformer layers.
#pragma once
#include <algorithm>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "autograd/ops.h"
#include "nn/module.h"

namespace tessera {

// Activations recomputed in the backward pass (Chen et al. 2016; Korthikanti et al. 2022, "Reducing activation
// recomputation in large transformer models"). Gradients are bitwise identical in all modes that layers implement.
enum class Recompute {
  none,
  activation,       // output of GELU (saves 4 C elements per token) or SwiGLU (F); costs an elementwise pass
  activation_norm,  // and the outputs of both norms (another 2 C)
  attention,        // output of attention (C) and its log-sum-exp; costs attention's forward pass
  block,            // everything except the block's input (C remain); costs a forward pass
  op,               // other frameworks' selective mode (all but attention and every second matmul); planning only
};

inline bool recomputes_activation(Recompute r) { return r == Recompute::activation || r == Recompute::activation_norm; }

class Lora;
struct LoraOptions;

// The matmul of a layer, as modified by strategies, adapters and 4-bit weights. Empty members: x w^T + b of the layer's
// own parameters.
//
//   x --input--> x w^T --output--> + adapters --> y
struct LinearHooks {
  // Replaces everything except adapters: x w^T + b; b may be undefined.
  using Matmul = std::function<Var(const Var& x, const Var& w, const Var& b, PackedWeights* packs)>;
  Matmul matmul = {};
  std::function<Var(DType dtype)> weight = {};  // w, if it is stored in a different form
  // Collectives of a sharded layer: on x, and on x w^T with b (undefined if the activation adds it).
  std::shared_ptr<const SharedInput> input = {};
  std::function<Var(Var partial, const Var& b)> output = {};
  WeightShards shards = {};  // for matmuls in leaves
  std::vector<Lora*> adapters = {};
};

// y = activation(x w^T + b): (..., in) -> (..., out).
class Linear : public Module {
 public:
  struct Options {
    bool bias = true;
    double deviation = 0.02;                           // of the initial weights
    std::optional<ActivationOptions> activation = {};  // of the result; ungated
  };
  Linear(int64_t in, int64_t out, const Options& options);
  Var forward(const Var& x) override;
  void drop_packs() override { packs_.packs.clear(); }
  // Adapts rows [first, first + out) of the weight. Call before materialization.
  Lora& adapt(const std::string& name, int64_t first, int64_t out, const LoraOptions& options);
  // Freezes the weight and stores it in 4 bits. Call before materialization.
  void quantize(const Packing& packing);
  // Whether an op may combine the matmul of weights() with others, and then call finish().
  bool may_fuse() const override {
    return Module::may_fuse() && !hooks.matmul && !hooks.weight && hooks.adapters.empty();
  }
  LinearWeights weights();
  Var finish(Var partial) { return hooks.output ? hooks.output(std::move(partial), used_bias()) : partial; }

  Var& weight;  // (out, in)
  Var* bias;    // (out), or null
  LinearHooks hooks;

 private:
  Var used_bias() { return bias ? used(*bias) : Var(); }
  Options options_;
  PackedWeights packs_;
};

// Normalization over the last dim with gamma, and with beta if it centers.
class Norm : public Module {
 public:
  Norm(int64_t channels, const NormOptions& options, Recompute recompute);
  Var forward(const Var& x) override { return norm(x, used(weight), beta(), options_, recompute_); }
  // {x + y, norm(x + y)} in one pass; may overwrite y.
  std::pair<Var, Var> add(const Var& x, Var y) {
    return add_norm(x, std::move(y), used(weight), beta(), options_, recompute_);
  }

  Var& weight;  // (channels)
  Var* bias;    // (channels), or null

 private:
  Var beta() const { return bias ? used(*bias) : Var(); }
  NormOptions options_;
  bool recompute_;
};

class LayerNorm : public Norm {
 public:
  explicit LayerNorm(int64_t channels, Recompute recompute = Recompute::none, double eps = 1e-5)
      : Norm(channels, {.eps = eps}, recompute) {}
};

class RMSNorm : public Norm {
 public:
  explicit RMSNorm(int64_t channels, Recompute recompute = Recompute::none, double eps = 1e-5)
      : Norm(channels, {.eps = eps, .center = false}, recompute) {}
};

class Embedding : public Module {
 public:
  Embedding(int64_t entries, int64_t channels, double deviation = 0.02);
  Var lookup(const Tensor& ids);  // int32 (...) -> (..., C)
  // Transposed use as the output head: x w^T, (..., C) -> (..., entries).
  Var project(const Var& x);
  Var logits(const Var& x);  // flattened to one row per token: (N, entries)
  // Cross-entropy of those logits: targets int32 (N), N rows of x.
  Loss loss(const Var& x, const Tensor& targets, double scale);
  void drop_packs() override { packs_.packs.clear(); }
  // Replacements for embedding(), linear() and linear_cross_entropy() of autograd/ops.h.
  struct Hooks {
    std::function<Var(const Tensor& ids, const Var& table)> lookup = {};
    LinearHooks::Matmul matmul = {};
    std::function<Loss(const Var& x, const Tensor& targets, double scale)> loss = {};
  };

  Var& weight;  // (entries, C)
  Hooks hooks;

 private:
  PackedWeights packs_;
};

// Drops elements of a (B, T, C) activation in training, with the counter-based RNG stream of the module's name.
class Dropout : public Module {
 public:
  explicit Dropout(double p) : p_(p) {}
  Var apply(Var x);  // may overwrite x
  double p() const { return p_; }
  // The input has channels from `first` on, of `total`.
  void set_channel_range(int64_t first, int64_t total) { first_channel_ = first, channels_total_ = total; }

 private:
  double p_;
  int64_t first_channel_ = 0, channels_total_ = 0;
};

// KV cache of one text: (1, capacity, H, D) for the local heads, allocated on first use; `length` tokens are filled.
struct KvCache {
  int64_t capacity = 0, length = 0;
  Tensor keys = {}, values = {};
};

class Rotary {
 public:
  // Throws FieldError for an odd head_dim, and for parameters of an inactive or different scaling.
  Rotary(int64_t context, int64_t head_dim, const RotaryOptions& options);
  // Rotates the first `heads` heads of packed x (B, T, W) by their document positions if defined, otherwise by the
  // step's positions, or from 0.
  Var apply(Var x, int64_t heads, const StepInfo& at);

 private:
  int64_t context_, head_dim_;
  RotaryOptions options_;
  Tensor table_;
};

// Causal self-attention (Vaswani et al. 2017, section 3.2; grouped queries: Ainslie et al. 2023) with packed [q | k |
// v]: (B, T, C) -> (B, T, C).
class Attention : public Module {
 public:
  // Attention between the two projections: packed (B, T, (H + 2 K) D) of the local heads -> (B, T, H D).
  using Core = std::function<Var(const Var& qkv, const Heads& heads, const AttentionOptions& options)>;
  struct Options {
    int64_t heads = 1;
    int64_t kv_heads = 0;                // 0: equal to heads
    int64_t head_dim = 0;                // 0: channels / heads
    double dropout = 0;                  // of the attention probabilities
    double projection_deviation = 0.02;  // of the output projection's initial weights
    bool qkv_bias = true, projection_bias = true;
    std::shared_ptr<Rotary> rotary = {};
    std::optional<double> norm_eps = {};  // RMSNorm of each head of q and k (Qwen3)
    int64_t window = 0;                   // in tokens; 0: unlimited
    bool recompute = false;               // of the attention between the projections
  };
  Attention(int64_t channels, const Options& options);
  Var forward(const Var& x) override;
  // Appends tokens (B, T, C) of B texts to their caches, at the step's document positions. Returns the last `answers`
  // tokens, (B, answers, C). No gradient.
  Tensor decode(const Tensor& x, std::span<KvCache* const> texts, int64_t answers);
  void set_attention(Core core) { require_object(core ? this : nullptr, "[attention] core"), core_ = std::move(core); }

  Heads heads() const { return {options_.heads, options_.kv_heads}; }  // of the unsharded layer
  int64_t head_dim() const { return options_.head_dim; }
  void set_local_heads(const Heads& here) { here_ = here; }

  Linear &qkv, &proj;
  Var *norm_q, *norm_k;  // (D), or null

 private:
  AttentionOptions at_step();
  Attention(const Options& resolved, int64_t channels);
  // Norms and rotation of q and k.
  Var prepare(Var packed);
  Options options_;
  Heads here_;
  Core core_ = packed_attention;
};

struct MlpOptions {
  double down_deviation = 0.02;
  bool bias = true;
  ActivationOptions activation = {};
};

// down(f(gate(x)) * up(x)): (..., C) -> (..., C); `gate_up` computes [gate | up].
class GatedMlp : public Module {
 public:
  GatedMlp(int64_t channels, int64_t hidden, const MlpOptions& options);
  Var forward(const Var& x) override { return down(activate(gate_up(x), activation_)); }

  Linear &gate_up, &down;

 private:
  ActivationOptions activation_;
};

// down(f(up(x))): (..., C) -> (..., C).
class Mlp : public Module {
 public:
  Mlp(int64_t channels, int64_t hidden, const MlpOptions& options);
  Var forward(const Var& x) override;

  Linear &up, &down;

 private:
  ActivationOptions activation_;
};

// Mean of (prediction - target)^2 over all elements: two tensors of equal shape -> ().
inline Var mean_squared_error(const Var& prediction, const Var& target) {
  if (!(prediction.shape() == target.shape()))
    throw Error("[mean_squared_error] prediction is " + prediction.value().describe() + ", target is " +
                target.value().describe() + "; expected equal shapes");
  return scale(sum(unary<Square>(prediction - target)), 1.0 / static_cast<double>(prediction.value().numel()));
}

}  // namespace tessera
