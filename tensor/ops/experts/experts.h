// Mixture-of-experts routing: assigns tokens to experts, and dispatches and combines their rows (Shazeer et al. 2017,
// "Outrageously large neural networks"; Fedus et al. 2021, "Switch transformers").
//
//   logits (N, E) --route--> chosen experts, weights (N, k), and a place for each choice among rows by expert
//   x (N, C) --dispatch_rows--> rows (R, C), those of expert 0 first, tokens in order --experts--> rows (R, C)
//   rows --combine_rows--> y (N, C): y[t] = sum over j of weights[t, j] rows[place[t, j]], in the order of j
//
// On a GPU all tensors reside there, and route() waits for it once: the host must know the number of rows per
// expert, because the sizes of matmuls and messages depend on it. In a dry run (cpu::DryRun) tokens are distributed
// evenly.
#pragma once

#include "tensor/tensor.h"

namespace tessera {

struct RouteOptions {
  int64_t per_token = 1;       // k; of experts with equal logits the first is chosen
  bool softmax_first = false;  // softmax over all experts, not only over the chosen ones
  int64_t sequences = 1;       // number of consecutive sequences of equal length in the N tokens
  // Maximum tokens per expert and sequence: first choices of all tokens have priority over second ones, then token
  // order decides. A choice beyond the capacity is dropped: it contributes nothing. 0: unlimited.
  int64_t capacity = 0;
  // Factors of the auxiliary losses of a sequence of T tokens whose gradients route_backward() adds, including the mean
  // over sequences:
  // balance E sum over experts of (choices / (k T)) (mean probability)         Fedus et al. 2021, equation 4
  // z       mean over tokens of (log sum exp of logits)^2                       Zoph et al. 2022, "ST-MoE", equation 5
  double balance = 0, z = 0;
  int64_t tokens = 0;  // T if only a part of each sequence is local
  Tensor given = {};   // int32 (N, k): choices that replace those of the logits
  // If only a part of each sequence is local: maps choices, int32 (N, k), to the number of preceding choices of the
  // same expert in the full sequence, int32 (N, k), which count against the capacity.
  std::function<Tensor(const Tensor& chosen)> earlier = {};
  // For sequences that end in padding, which gets no row, no loss and no choice (its `chosen` is E): tokens of each
  // sequence, number of local ones (they come first), and capacity. Empty: no padding.
  struct Length {
    int64_t tokens = 0, here = 0, capacity = 0;
  };
  std::vector<Length> lengths = {};
};

struct Routed {
  Tensor chosen;   // int32 (N, k): experts, best first
  Tensor place;    // int32 (N, k): the row of each choice, -1 if dropped
  Tensor weights;  // (N, k), float32, or float64 for float64
  std::vector<int64_t> counts = {};
  int64_t rows = 0, dropped = 0;
  // float64 (sequences, E): number of choices, including dropped ones. The caller adds those of non-local tokens.
  Tensor of_sequences = {};
  // With `given`: number of tokens that the logits would have sent to other experts, and the maximum by which the logit
  // of an expert that was left out exceeds that of the given one.
  int64_t elsewhere = 0;
  double margin = 0;
};

// logits (N, E). Throws Error unless 1 <= per_token <= E and `sequences` divides N. Cost: N E exponentials.
Routed route(const Tensor& logits, const RouteOptions& options);
// Includes the gradients of the auxiliary losses above.
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
// Fills `out`, whose tensors of N rows the caller allocates; with `given`, `chosen` already contains the choices.
void route(Routed& out, const Tensor& logits, const RouteOptions& options);
void route_backward(const Tensor& out, const Tensor& dweights, const Tensor& logits, const Routed& routed,
                    const RouteOptions& options);
void dispatch_rows(const Tensor& rows, const Tensor& x, const Tensor& place);
// Undefined weights count as 1.
void combine_rows(const Tensor& y, const Tensor& rows, const Tensor& weights, const Tensor& place);
void combine_rows_backward(const CombineGrads& out, const Tensor& dy, const Tensor& rows, const Tensor& weights,
                           const Tensor& place);
}  // namespace cuda

// Grouped GEMM for linear layers y = x w^T, as in the experts of a layer: rows of group 0, then those of group 1, and
// so on, each group with its own w and a number of rows that varies from call to call.
//
// Each element is one chain of fused multiply-adds in the order of the inner dim (tensor/ops/matmul/cpu/gemm.h), so
// a row's bits depend neither on the number of rows and groups, nor on its position, nor on threads; and no kernel is
// compiled for a number of rows. bfloat16 is multiplied in float32 and rounded once. On a GPU all groups share one
// launch; float32 and float64 are bitwise identical to the CPU, and bfloat16 uses tensor cores, which accumulate
// sixteen elements of the inner dim at a time, in order. Groups may be empty; their weight gradient is zero. Cost: 2 R
// N K FLOPs.

struct GemmGroup {
  Tensor w;           // (N, K), with the dtype of the rows; or the gradient of such a weight
  int64_t rows = 0;   // number of consecutive rows multiplied by w
  bool adds = false;  // accumulate the gradient into w, as add_() would
};

// x (R, K) -> (R, N).
Tensor grouped_linear(const Tensor& x, const std::vector<GemmGroup>& groups);
// dy (R, N) -> (R, K).
Tensor grouped_linear_input_grad(const Tensor& dy, const std::vector<GemmGroup>& groups);
// Writes dy^T x of each group's rows to its gradient: any floating dtype, or undefined if not needed.
void grouped_linear_weight_grads(const std::vector<GemmGroup>& groups, const Tensor& dy, const Tensor& x);

enum class GemmKind : uint8_t { forward, input_grad, weight_grad };

namespace cuda {
// other = left w^T, other = left w, or w = left^T other, for contiguous matrices; one launch per 192 groups.
void grouped_gemm(GemmKind which, const Tensor& left, const Tensor& other, const std::vector<GemmGroup>& groups);
}  // namespace cuda

}  // namespace tessera
