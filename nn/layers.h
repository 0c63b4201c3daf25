// The layers of a transformer.
#pragma once

#include "autograd/ops.h"
#include "nn/module.h"

namespace tessera {

// Activations that backward makes again instead of keeping (Chen et al. 2016; Korthikanti et al. 2022, "Reducing
// activation recomputation in large transformer models"). Gradients are bit for bit the same in all that layers know.
enum class Recompute {
  none,
  activation,       // the output of GELU (4 C numbers per token less) or of SwiGLU (F less): an elementwise pass more
  activation_norm,  // and the outputs of both norms: another 2 C
  attention,        // the output of attention, C less, and its log-sum-exp: attention's forward pass once more
  block,            // everything but the block's input: C are left, one forward pass more
  op,               // other programs': all but what attention and every second product give; no layer here does it
};

inline bool makes_activation_again(Recompute r) {
  return r == Recompute::activation || r == Recompute::activation_norm;
}

enum class Activation { none, gelu, gelu_erf };

// Another way to x w^T + b, b maybe undefined, than linear() of autograd/ops.h.
using Product = std::function<Var(const Var& x, const Var& w, const Var& b, PackedWeights* packs)>;

class Lora;
struct LoraOptions;

// y = activation(x w^T + b): (..., in) -> (..., out).
class Linear : public Module {
 public:
  struct Options {
    bool bias = true;
    double deviation = 0.02;  // standard deviation of the initial weights
    Activation activation = Activation::none;
    Recompute recompute = Recompute::none;
  };
  Linear(int64_t in, int64_t out, const Options& options);
  Var forward(const Var& x) override;
  void set_matmul(Product product) { product_ = std::move(product); }
  // Ranks share the layer: the input of its product, and what makes y of the product's own y, without a bias, and b
  // (undefined where an activation adds it).
  using Finish = std::function<Var(Var partial, const Var& b)>;
  void share(std::shared_ptr<const SharedInput> input) { input_ = std::move(input); }
  void share(Finish finish) { finish_ = std::move(finish); }
  void drop_packs() override { packs_.packs.clear(); }
  // Adds an adapter of the rows [first, first + out) of the weight; see nn/adapters/lora.h. Before there is memory.
  Lora& adapt(const std::string& name, int64_t first, int64_t out, const LoraOptions& options);
  const std::vector<Lora*>& adapters() const { return adapters_; }
  // Whether forward() is linear() and the activation and nothing else: then an op may do this layer with others.
  bool is_plain() const { return is_one_product() && !input_ && !finish_; }
  // Whether it is that but for what ranks share of it: then an op may make weights()' product with others, and finish()
  // goes on.
  bool is_one_product() const { return !product_ && !is_wrapped() && adapters_.empty() && !packed_; }
  // The weight is frozen, and held in four bits from now on. Before there is memory.
  void quantize(const Packing& packing);
  LinearWeights weights();  // as the product of the forward pass sees them
  Var finish(Var partial) { return finish_ ? finish_(std::move(partial), seen_bias()) : partial; }

  Var& weight;  // (out, in)
  Var* bias;    // (out), or null

 private:
  Var seen_bias() { return bias ? seen(*bias) : Var(); }
  Var multiply(const Var& x, const Var& w, const Var& b, PackedWeights* packs);
  Options options_;
  Product product_;
  std::shared_ptr<const SharedInput> input_;
  Finish finish_;
  std::vector<Lora*> adapters_;
  const Parameter* packed_ = nullptr;  // the weight, where it is
  PackedWeights packs_;
};

// The common part of LayerNorm and RMSNorm: a normalisation over the last dim with gamma, and with beta where it
// centers.
class Norm : public Module {
 public:
  Norm(int64_t channels, const NormOptions& options, Recompute recompute);
  Var forward(const Var& x) override { return norm(x, seen(weight), beta(), options_, recompute_); }
  // {x + y, norm(x + y)} in one pass; y may be written over.
  std::pair<Var, Var> add(const Var& x, Var y) {
    return add_norm(x, std::move(y), seen(weight), beta(), options_, recompute_);
  }

  Var& weight;  // (channels)
  Var* bias;    // (channels), or null

 private:
  Var beta() const { return bias ? seen(*bias) : Var(); }
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
  // The transposed use, as the head of a model: x w^T, (..., C) -> (..., entries).
  Var project(const Var& x);
  Var logits(const Var& x);  // the same with a row for each token: (N, entries)
  // And its loss: targets int32 (N), N rows of x.
  Loss loss(const Var& x, const Tensor& targets, double scale);
  // Other ways to do these than embedding(), linear() and linear_cross_entropy() of autograd/ops.h.
  using Lookup = std::function<Var(const Tensor& ids, const Var& table)>;
  using HeadLoss = std::function<Loss(const Var& x, const Tensor& targets, double scale)>;
  void set_loss(HeadLoss loss) { loss_ = std::move(loss); }
  void set_lookup(Lookup lookup) { lookup_ = std::move(lookup); }
  void set_matmul(Product product) { product_ = std::move(product); }
  void drop_packs() override { packs_.packs.clear(); }

  Var& weight;  // (entries, C)

 private:
  Lookup lookup_;
  Product product_;
  HeadLoss loss_;
  PackedWeights packs_;
};

// Drops elements of a (B, T, C) activation while training, by counted randomness: its stream is named after itself.
class Dropout : public Module {
 public:
  explicit Dropout(double p) : p_(p) {}
  Var apply(Var x);  // may write over x
  double p() const { return p_; }
  // Its input has the channels from `first` on, of `total`.
  void keep_channels(int64_t first, int64_t total) { first_channel_ = first, channels_total_ = total; }

 private:
  double p_;
  int64_t first_channel_ = 0, channels_total_ = 0;
};

// Keys and values of the tokens of one text so far, for decoding one token after another: (1, capacity, H, D) of the
// heads that are here, made when they are first needed; `length` is filled.
struct KvCache {
  int64_t capacity = 0, length = 0;
  Tensor keys = {}, values = {};
};

// The table of rotary positions that the attention layers of a model share.
class Rotary {
 public:
  // Throws FieldError for an odd head_dim, and for numbers of a scaling that is not chosen or does not use them.
  Rotary(int64_t context, int64_t head_dim, const RotaryOptions& options);
  // Turns the first `heads` heads of packed x (B, T, W) at their positions within documents, where the step has these,
  // else at the step's positions, or from 0 on where it has none.
  Var apply(Var x, int64_t heads, const StepInfo& at);

 private:
  int64_t context_, head_dim_;
  RotaryOptions options_;
  Tensor table_;  // made when it is first needed
};

// Causal self-attention with packed [q | k | v]: (B, T, C) -> (B, T, C). Vaswani et al. 2017, section 3.2; with fewer
// heads of keys and values than of queries Ainslie et al. 2023.
class Attention : public Module {
 public:
  // The attention between the two projections: packed (B, T, (H + 2 K) D) of the heads that are here, maybe not all ->
  // (B, T, H D).
  using Core = std::function<Var(const Var& qkv, const Heads& heads, const AttentionOptions& options)>;
  struct Options {
    int64_t heads = 1;
    int64_t kv_heads = 0;                // 0: as many
    int64_t head_dim = 0;                // 0: channels / heads
    double dropout = 0;                  // dropout of the attention probabilities
    double projection_deviation = 0.02;  // the deviation of the output projection's initial weights
    bool qkv_bias = true, projection_bias = true;
    std::shared_ptr<Rotary> rotary = {};  // or null
    std::optional<double> norm_eps = {};  // where there is one, each head of q and k is normalised (Qwen3)
    int64_t window = 0;                   // last tokens that one attends to; 0: all
    bool recompute = false;               // the attention between the projections is made again in backward
  };
  Attention(int64_t channels, const Options& options);
  Var forward(const Var& x) override;
  // The same for new tokens (B, T, C) of B texts, behind those in their caches, at the step's positions within
  // documents; appends their keys and values. Gives the last `answers` tokens, (B, answers, C). No gradient.
  Tensor decode(const Tensor& x, std::span<KvCache* const> texts, int64_t answers);
  // Another way to compute the same; packed_attention() unless it is set.
  void set_attention(Core core) { core_ = std::move(core); }

  Heads heads() const { return {options_.heads, options_.kv_heads}; }  // heads of the whole layer
  int64_t head_dim() const { return options_.head_dim; }
  // Says that only these heads of the projections are here.
  void keep_heads(const Heads& here) { here_ = here; }

  Linear &qkv, &proj;
  Var *norm_q, *norm_k;  // (D), or null

 private:
  AttentionOptions at_step();
  Attention(const Options& resolved, int64_t channels);
  // q and k normalised and turned, where the options say so.
  Var prepare(Var packed);
  Options options_;
  Heads here_;
  Core core_ = packed_attention;
};

// down(silu(gate(x)) * up(x)): (..., C) -> (..., C); `gate_up` makes both, [gate | up].
class GatedMlp : public Module {
 public:
  GatedMlp(int64_t channels, int64_t hidden, double down_deviation, Recompute recompute, bool bias = false);
  Var forward(const Var& x) override { return down(swiglu(gate_up(x), recompute_)); }

  Linear &gate_up, &down;

 private:
  bool recompute_;
};

// down(gelu(up(x))): (..., C) -> (..., C).
class Mlp : public Module {
 public:
  struct Options {
    double down_deviation = 0.02;
    Recompute recompute = Recompute::none;
    bool bias = true;
    GeluForm gelu = GeluForm::tanh;
  };
  Mlp(int64_t channels, int64_t hidden, const Options& options);
  Var forward(const Var& x) override;

  Linear &up, &down;

 private:
  Options options_;
};

// Losses. The cross-entropy of a language model is fused with its softmax: cross_entropy() in autograd/ops.h.

// The mean of (prediction - target)^2 over all elements: two tensors of one shape -> ().
inline Var mean_squared_error(const Var& prediction, const Var& target) {
  if (!(prediction.shape() == target.shape()))
    throw Error("[mean_squared_error] prediction is " + prediction.value().describe() + ", target is " +
                target.value().describe() + "; expected one shape");
  return scale(sum(unary<Square>(prediction - target)), 1.0 / static_cast<double>(prediction.value().numel()));
}

}  // namespace tessera
