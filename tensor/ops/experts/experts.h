// Mixture-of-experts routing: assigns tokens to experts, and dispatches and combines their rows (Shazeer et al. 2017,
// "Outrageously large neural networks"; Fedus et al. 2021, "Switch transformers").
//
//   logits (N, E) --route--> chosen experts, weights (N, k), and each choice's place among the rows grouped by expert
//   x (N, C) --dispatch_rows--> rows (R, C), grouped by expert, tokens in order --experts--> rows (R, C)
//   rows --combine_rows--> y (N, C): y[t] = sum over j of weights[t, j] rows[place[t, j]], in the order of j
//
// On a GPU route() waits once for the number of rows per expert, because sizes of matmuls and messages depend on it. In
// a dry run (cpu::DryRun) tokens are distributed evenly.
#pragma once
#include <cstdint>
#include <functional>
#include <vector>

#include "tensor/tensor.h"

namespace tessera {

struct RouteOptions {
  int64_t per_token = 1;       // k; ties choose the first expert
  bool softmax_first = false;  // softmax over all experts, not only the chosen ones
  int64_t sequences = 1;       // equal-length sequences in the N tokens
  // Maximum tokens per expert and sequence: first choices of all tokens precede second choices; within each, token
  // order decides. Choices beyond the capacity are dropped. 0: unlimited.
  int64_t capacity = 0;
  // Factors of the auxiliary losses of a sequence of T tokens, including the mean over sequences; route_backward() adds
  // their gradients:
  //
  // balance E sum over experts of (choices / (k T)) (mean probability)         Fedus et al. 2021, equation 4
  // z       mean over tokens of (log sum exp of logits)^2                       Zoph et al. 2022, "ST-MoE", equation 5
  double balance = 0, z = 0;
  int64_t tokens = 0;    // T if sequences are sharded
  Tensor replayed = {};  // int32 (N, k): used instead of the logits' choices
  // If sequences are sharded: maps choices, int32 (N, k), to the number of preceding choices of the same expert in the
  // full sequence, int32 (N, k), which count against the capacity.
  std::function<Tensor(const Tensor& chosen)> earlier = {};
  // For sequences that end in padding, which has no row, no loss and no choice (its `chosen` is E): the number of
  // tokens of each sequence, of local tokens (which come first), and the capacity. Empty: no padding.
  struct Length {
    int64_t tokens = 0, here = 0, capacity = 0;
  };
  std::vector<Length> lengths = {};
};

struct Routed {
  Tensor chosen;   // int32 (N, k): experts, best first
  Tensor place;    // int32 (N, k): row of each choice; -1: dropped
  Tensor weights;  // (N, k), float32, or float64 for float64
  std::vector<int64_t> counts = {};
  int64_t rows = 0, dropped = 0;
  // float64 (sequences, E): number of choices, including dropped ones. The caller adds the choices of non-local tokens.
  Tensor of_sequences = {};
  // With `replayed`: number of tokens that the logits would have sent to other experts, and the maximum by which the
  // logit of an excluded expert exceeds the logit of the replayed expert.
  int64_t elsewhere = 0;
  double margin = 0;
};

// logits (N, E). Throws Error unless 1 <= per_token <= E and `sequences` divides N. Cost: N E exponentials.
Routed route(const Tensor& logits, const RouteOptions& options);
// Includes the gradients of the auxiliary losses.
Tensor route_backward(const Tensor& dweights, const Tensor& logits, const Routed& routed, const RouteOptions& options);

// x (N, C) -> (R, C). Cost: one pass over the rows.
Tensor dispatch_rows(const Tensor& x, const Routed& routed);
// drows (R, C) -> dx (N, C), summed in the order of choices.
Tensor dispatch_rows_backward(const Tensor& drows, const Routed& routed);
// rows (R, C), weights as in `routed` -> (N, C), rounded once.
Tensor combine_rows(const Tensor& rows, const Tensor& weights, const Routed& routed);
struct CombineGrads {
  Tensor rows, weights;
};
CombineGrads combine_rows_backward(const Tensor& dy, const Tensor& rows, const Tensor& weights, const Routed& routed);

namespace cuda {
// The caller allocates `out`'s tensors of N rows; with `replayed`, `chosen` contains the choices.
void route(Routed& out, const Tensor& logits, const RouteOptions& options);
void route_backward(const Tensor& out, const Tensor& dweights, const Tensor& logits, const Routed& routed,
                    const RouteOptions& options);
void dispatch_rows(const Tensor& rows, const Tensor& x, const Tensor& place);
// Undefined weights count as 1.
void combine_rows(const Tensor& y, const Tensor& rows, const Tensor& weights, const Tensor& place);
void combine_rows_backward(const CombineGrads& out, const Tensor& dy, const Tensor& rows, const Tensor& weights,
                           const Tensor& place);
}  // namespace cuda

// Grouped GEMM for linear layers y = x w^T, such as a layer's experts: each group has its own w and a varying number of
// consecutive rows.
//
// Each element is one chain of fused multiply-adds in the order of the inner dim (tensor/ops/matmul/cpu/gemm.h), so a
// row is bitwise independent of its position and of the number of rows, groups and threads; no kernel is compiled for a
// specific number of rows. bfloat16 is multiplied in float32 and rounded once. On a GPU all groups share one launch;
// float32 and float64 are bitwise identical to the CPU, and bfloat16 uses tensor cores, which accumulate sixteen
// elements of the inner dim at a time, in order. An empty group's weight gradient is zero. Cost: 2 R N K FLOPs.

struct GemmGroup {
  Tensor w;  // (N, K), with the dtype of the rows; or the gradient of such a weight
  int64_t rows = 0;
  bool adds = false;  // accumulate the gradient into w
};

// x (R, K) -> (R, N).
Tensor grouped_linear(const Tensor& x, const std::vector<GemmGroup>& groups);
// dy (R, N) -> (R, K).
Tensor grouped_linear_input_grad(const Tensor& dy, const std::vector<GemmGroup>& groups);
// Writes dy^T x of each group's rows to the group's `w`: a gradient of any floating dtype, or undefined if not needed.
void grouped_linear_weight_grads(const std::vector<GemmGroup>& groups, const Tensor& dy, const Tensor& x);

enum class GemmKind : uint8_t { forward, input_grad, weight_grad };

namespace cuda {
// other = left w^T, other = left w, or w = left^T other; contiguous matrices; one launch per 192 groups.
void grouped_gemm(GemmKind which, const Tensor& left, const Tensor& other, const std::vector<GemmGroup>& groups);
}  // namespace cuda

}  // namespace tessera
