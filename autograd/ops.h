// Ops on Vars: each value beside its gradient. What an op computes, its shapes and errors stand in tensor/ops/.
//
// Ops that take a Var by value may write over it: pass std::move(x) when x is not needed again.
#pragma once

#include "autograd/var.h"
#include "tensor/ops/activations.h"
#include "tensor/ops/attention/attention.h"
#include "tensor/ops/cross_entropy.h"
#include "tensor/ops/dropout.h"
#include "tensor/ops/elementwise.h"
#include "tensor/ops/norm.h"
#include "tensor/ops/rotary.h"

namespace tessera {

// --- elementwise: any op of elementwise_list.h; shapes broadcast ---
template <class Op>
Var unary(const Var& x) {
  return record_one(Op::name, unary<Op>(x.value()), {x},
                    [saved = x.saved()](Grads& g) { g.give(0, unary_backward<Op>(g.output(), saved.get())); });
}
template <class Op>
Var binary(const Var& a, const Var& b) {
  return record_one(Op::name, binary<Op>(a.value(), b.value()), {a, b}, [a = a.saved(), b = b.saved()](Grads& g) {
    for (int i = 0; i < 2; ++i)
      if (g.needs(i)) g.give(i, binary_backward<Op>(g.output(), a.get(), b.get(), i));
  });
}
Var add(const Var& a, Var b);  // a + b, keeping neither; written over b when that may be
inline Var operator+(const Var& a, const Var& b) { return add(a, b); }
inline Var operator-(const Var& a, const Var& b) { return binary<Sub>(a, b); }
inline Var operator*(const Var& a, const Var& b) { return binary<Mul>(a, b); }
inline Var operator/(const Var& a, const Var& b) { return binary<Div>(a, b); }
Var scale(const Var& x, double factor);

// --- shape ---
Var reshape(const Var& x, const Shape& shape);
Var transpose(const Var& x, int a, int b);
Var narrow(const Var& x, int dim, int64_t start, int64_t length);
Var sum(const Var& x);  // all elements, shape ()
// y (..., N) with t (..., n) added to its columns from `first` on.
Var add_columns(Var y, int64_t first, const Var& t);
// x itself; calls f when the backward pass comes by, before x's own node runs. Calls nothing when no gradient comes.
Var on_backward(Var x, std::function<void()> f);

// --- products ---
Var matmul(const Var& a, const Var& b);
// The input of a layer whose outputs are made by several ranks (parallel/tensor_parallel.h): between layers each rank
// has all of it or a part, and the gradients that the ranks make of it are added up.
struct SharedInput {
  using Arriving = std::function<Tensor()>;               // waits for what was begun; to be called once
  std::function<Tensor(const Tensor& part)> gather;       // the whole input
  std::function<Arriving(Tensor part)> gather_again;      // the same in the backward pass; null where a part is all
  std::function<Arriving(Tensor whole_gradient)> reduce;  // the gradient of the part
};

// x (..., K), w (N, K), b (N) or undefined. The gradient of x comes first; those of w and b may be deferred. With
// `shared`, x is this rank's part: the gradient of w is made while that of x is on its way.
Var linear(const Var& x, const Var& w, const Var& b, PackedWeights* packs = nullptr,
           std::shared_ptr<const SharedInput> shared = nullptr);

// A linear layer: w (N, K), b (N) or undefined, its packed copies or null, and where its input comes from, or null.
struct LinearWeights {
  Var w, b;
  PackedWeights* packs = nullptr;
  std::shared_ptr<const SharedInput> shared = nullptr;
};
// down(gelu(up(x))): x (..., C) -> (..., C'). The bits on the CPU are those of linear(), bias_gelu() and linear(). With
// `recompute` the output of GELU is made again in the backward pass. The input of `up` may be shared.
Var gelu_mlp(const Var& x, const LinearWeights& up, const LinearWeights& down, bool recompute = false,
             GeluForm form = GeluForm::tanh);

// --- fused and structured ---
// With `recompute`, here and in bias_gelu, the result is made again from its input wherever an op saves it.
Var norm(const Var& x, const Var& gamma, const Var& beta, const NormOptions& options = {}, bool recompute = false);
// {x + y, norm(x + y)}.
std::pair<Var, Var> add_norm(const Var& x, Var y, const Var& gamma, const Var& beta, const NormOptions& options = {},
                             bool recompute = false);
// x + y, which a norm makes on its way where it is the first to read it (Var::defer_add).
Var add_residual(const Var& x, Var y);
Var softmax(const Var& x);
Var log_softmax(const Var& x);
// gelu(x + bias).
Var bias_gelu(Var x, const Var& bias, bool recompute = false, GeluForm form = GeluForm::tanh);
Var embedding(const Tensor& ids, const Var& table);  // the ids may lie on the host, wherever the table lies
// silu(gate) * up of x = [gate | up] (..., 2 F) -> (..., F).
Var swiglu(const Var& x, bool recompute = false);
Var dropout(Var x, double p, const DropoutTile& tile);
Var attention(const Var& q, const Var& k, const Var& v, const AttentionOptions& options = {});
// qkv (B, T, (H + 2 K) D), packed as [q | k | v] -> (B, T, H D).
Var packed_attention(const Var& qkv, const Heads& heads, const AttentionOptions& options = {});
// The same qkv with the D numbers of each head of q and of k normalised, and times gamma_q or gamma_k (D): RMSNorm.
Var norm_heads(const Var& qkv, const Heads& heads, const Var& gamma_q, const Var& gamma_k, double eps);
// rotate() of tensor/ops/rotary.h.
Var rotate(Var x, const RopeArgs& turn);

struct Loss {
  Var mean;               // loss_sum * scale, float64 (); the root of backward()
  DeviceScalar loss_sum;  // over this call's target tokens
  DeviceScalar count;     // target tokens; rows with target -1 are ignored
};
// logits (N, V), targets int32 (N), there or on the host; `scale` is 1 / (target tokens of the whole global batch), so
// that micro-batches and ranks add up to the mean without a division of their own.
Loss cross_entropy(Var logits, const Tensor& targets, double scale);
// x w^T for a w that is a vocabulary, made in blocks of rows (tensor/ops/cross_entropy.h): x (..., C), w (V, C).
Var linear_by_rows(const Var& x, const Var& w, PackedWeights* packs = nullptr, int64_t most_bytes = kLogitsBytes);
// cross_entropy() of that product, bit for bit, where its logits take more than `most_bytes` without having them in
// memory: both gradients are then made in the forward pass, for a seed of one, and scaled in the backward pass for
// another. Targets int32 (N), N rows of x.
Loss linear_cross_entropy(const Var& x, const Var& w, const Tensor& targets, double scale,
                          PackedWeights* packs = nullptr, int64_t most_bytes = kLogitsBytes);

// Recomputation of a block: its activations are not kept; backward runs its forward again.
//
// Chen et al. 2016, "Training deep nets with sublinear memory cost". Randomness is counted, so the second forward draws
// the same dropout masks, and every op gives the same bits twice: gradients are bit for bit those of the plain block.

// f(inputs), keeping only the inputs. At least one input must require a gradient when gradients are on. Cost: one more
// forward pass of the block. With `drop_result` an op that saves the result for its backward keeps nothing either: it
// has it from that second forward pass, which then comes earlier.
Var checkpoint(const std::function<Var(const std::vector<Var>&)>& f, const std::vector<Var>& inputs,
               bool drop_result = false);

}  // namespace tessera
