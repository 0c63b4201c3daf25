// Differentiable ops on Vars (ops.cpp, and ops/ by family); tensor/ops/ documents values, shapes and errors. Ops that
// accept a Var by value may overwrite it: pass std::move(x) if x is not used afterwards.
#pragma once
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <vector>

#include "autograd/var.h"
#include "tensor/ops/activations.h"
#include "tensor/ops/attention/attention.h"
#include "tensor/ops/cross_entropy.h"
#include "tensor/ops/dropout.h"
#include "tensor/ops/elementwise.h"
#include "tensor/ops/norm.h"
#include "tensor/ops/rotary.h"

namespace tessera {

// Any op of elementwise_list.h; shapes broadcast.
template <class Op>
Var unary(const Var& x) {
  return record_one(Op::name, unary<Op>(x.value()), {x},
                    [saved = x.saved()](Grads& g) { g.set(0, unary_backward<Op>(g.output(), saved.get())); });
}
template <class Op>
Var binary(const Var& a, const Var& b) {
  return record_one(Op::name, binary<Op>(a.value(), b.value()), {a, b}, [a = a.saved(), b = b.saved()](Grads& g) {
    for (int i = 0; i < 2; ++i)
      if (g.needs(i)) g.set(i, binary_backward<Op>(g.output(), a.get(), b.get(), i));
  });
}
Var add(const Var& a, Var b);  // saves neither operand; reuses b's memory if possible
inline Var operator+(const Var& a, const Var& b) { return add(a, b); }
inline Var operator-(const Var& a, const Var& b) { return binary<Sub>(a, b); }
inline Var operator*(const Var& a, const Var& b) { return binary<Mul>(a, b); }
inline Var operator/(const Var& a, const Var& b) { return binary<Div>(a, b); }
Var scale(const Var& x, double factor);

Var reshape(const Var& x, const Shape& shape);
Var transpose(const Var& x, int a, int b);
Var narrow(const Var& x, int dim, int64_t start, int64_t length);
Var sum(const Var& x);
// y (..., N) with t (..., n) added to its columns from `first` on.
Var add_columns(Var y, int64_t first, const Var& t);
// Returns x; calls f in the backward pass before x's own node runs, unless no gradient arrives.
Var on_backward(Var x, std::function<void()> f);

Var matmul(const Var& a, const Var& b);
// Collectives on the input of a layer whose outputs are sharded over ranks (parallel/tensor_parallel.h): the activation
// is unsharded or sharded, and the input gradients are reduced.
struct SharedInput {
  using Arriving = std::function<Tensor()>;  // waits for a started collective; call once
  std::function<Tensor(const Tensor& shard)> gather;
  std::function<Arriving(Tensor shard)> regather;        // in the backward pass; null if unsharded
  std::function<Arriving(Tensor full_gradient)> reduce;  // the shard's gradient
};

// x (..., K), w (N, K), b (N) or undefined. The gradient of x is computed first; those of w and b may be deferred. With
// `shared`, x is this rank's shard, and computing w's gradient overlaps with reducing x's.
Var linear(const Var& x, const Var& w, const Var& b, PackedWeights* packs = nullptr,
           std::shared_ptr<const SharedInput> shared = nullptr);

// w (N, K), b (N) or undefined; pointers are null without packed weights or collectives.
struct LinearWeights {
  Var w, b;
  PackedWeights* packs = nullptr;
  std::shared_ptr<const SharedInput> shared = nullptr;
};
// How a feed-forward layer activates its hidden channels; models, layers and experts pass this record on.
struct ActivationOptions {
  Activation kind = Activation::gelu;
  bool gated = false;      // f(gate) * up of x = [gate | up] (..., 2 F) -> (..., F), instead of f(x)
  bool recompute = false;  // ops that would save the result recompute it from x
};
inline constexpr ActivationOptions kSwiglu{.kind = Activation::silu, .gated = true};
// `bias` (C), if defined, is added to an ungated x, which may be overwritten.
Var activate(Var x, const ActivationOptions& options, const Var& bias = Var());
// down(activate(up(x))), ungated: x (..., C) -> (..., C'). On the CPU bitwise identical to linear(), activate() and
// linear(). The input of `up` may be sharded.
Var mlp(const Var& x, const LinearWeights& up, const LinearWeights& down, const ActivationOptions& options = {});

// `recompute` as in ActivationOptions.
Var norm(const Var& x, const Var& gamma, const Var& beta, const NormOptions& options = {}, bool recompute = false);
// {x + y, norm(x + y)}.
std::pair<Var, Var> add_norm(const Var& x, Var y, const Var& gamma, const Var& beta, const NormOptions& options = {},
                             bool recompute = false);
// Defers the addition so that a norm can fuse it (autograd/fusion.h).
Var add_residual(const Var& x, Var y);
Var softmax(const Var& x);
Var log_softmax(const Var& x);
Var embedding(const Tensor& ids, const Var& table);  // ids may be in host memory for a table on a GPU
Var dropout(Var x, double p, const DropoutTile& tile);
Var attention(const Var& q, const Var& k, const Var& v, const AttentionOptions& options = {});
// qkv (B, T, (H + 2 K) D), packed as [q | k | v] -> (B, T, H D).
Var packed_attention(const Var& qkv, const Heads& heads, const AttentionOptions& options = {});
// RMSNorm of the D elements of each head of q and k in qkv, with scales gamma_q and gamma_k (D).
Var norm_heads(const Var& qkv, const Heads& heads, const Var& gamma_q, const Var& gamma_k, double eps);
Var rotate(Var x, const RopeArgs& rope);

struct Loss {
  Var mean;               // loss_sum * scale, float64 (); the root of backward()
  DeviceScalar loss_sum;  // over this call's target tokens
  DeviceScalar count;     // of target tokens; rows with target -1 are ignored
};
// logits (N, V), targets int32 (N) on the same device or the host. `scale` is 1 / (target tokens of the global batch),
// so that micro-batches and ranks sum to the mean.
Loss cross_entropy(Var logits, const Tensor& targets, double scale);
// x w^T for a vocabulary w, in blocks of rows (tensor/ops/cross_entropy.h): x (..., C), w (V, C).
Var linear_by_rows(const Var& x, const Var& w, PackedWeights* packs = nullptr, int64_t max_bytes = kLogitsBytes);
// Bitwise identical to cross_entropy() of that matmul, without storing logits of more than `max_bytes`: the forward
// pass then computes both gradients for a seed of one, and the backward pass scales them. Targets int32 (N), N rows of
// x.
Loss linear_cross_entropy(const Var& x, const Var& w, const Tensor& targets, double scale,
                          PackedWeights* packs = nullptr, int64_t max_bytes = kLogitsBytes);

// Activation checkpointing (Chen et al. 2016, "Training deep nets with sublinear memory cost"): f(inputs), saving only
// the inputs; the backward pass reruns f. At least one input must require a gradient if gradients are enabled. Cost:
// one additional forward pass of f. Dropout uses the counter-based RNG and ops are deterministic, so gradients are
// bitwise identical to those of plain f. With `drop_result`, an op that would save the result for its backward pass
// triggers the rerun of f instead, and uses the recomputed result.
Var checkpoint(const std::function<Var(const std::vector<Var>&)>& f, const std::vector<Var>& inputs,
               bool drop_result = false);

}  // namespace tessera
