// Routing of a mixture of experts: which experts a token goes to, and the way of its row there and back (Shazeer et al.
// 2017, "Outrageously large neural networks"; Fedus et al. 2021, "Switch transformers").
//
//   logits (N, E) --route--> chosen experts, weights (N, k), and a place for each choice among rows by expert
//   x (N, C) --dispatch_rows--> rows (R, C), those of expert 0 first, tokens in order --experts--> rows (R, C)
//   rows --combine_rows--> y (N, C): y[t] = sum over j of weights[t, j] rows[place[t, j]], in the order of j
//
// On a GPU all tensors lie there, and route() waits for it once: the host must know how many rows each expert has,
// since the sizes of products and of messages depend on it. Where nothing is computed (cpu::DryRun) the tokens are
// shared out evenly.
#pragma once

#include "tensor/tensor.h"

namespace tessera {

struct RouteOptions {
  int64_t per_token = 1;       // k: of two experts with equal logits the first is chosen
  bool softmax_first = false;  // weights are probabilities among all experts, not among the chosen
  int64_t sequences = 1;       // that the N tokens make, one after another, all of one length
  // Most tokens of a sequence that an expert takes: first choices of all its tokens first, then second ones, in
  // order of tokens. A choice without a place is dropped: it adds nothing. 0: every choice has a place.
  int64_t capacity = 0;
  // Factors of the losses of a sequence of T tokens that route_backward() adds, the mean over sequences included:
  // balance E sum over experts of (choices / (k T)) (mean probability)         Fedus et al. 2021, equation 4
  // z       mean over tokens of (log sum exp of logits)^2                       Zoph et al. 2022, "ST-MoE", equation 5
  double balance = 0, z = 0;
  int64_t tokens = 0;  // T, where only a part of each sequence is here; 0: all of it
  Tensor given = {};   // int32 (N, k): choices that were made elsewhere, in the place of those that the logits make
  // Counts earlier choices, for the capacity, where only a part of each sequence is here: from choices, int32 (N, k),
  // how many that come before each of them in its whole sequence want the same expert, int32 (N, k).
  std::function<Tensor(const Tensor& chosen)> earlier = {};
  // Where sequences end in padding, which has no place, no loss and no choice (its `chosen` is E): of each sequence its
  // tokens, those of them that are here, which come first, and its capacity. Empty: none does.
  struct Length {
    int64_t tokens = 0, here = 0, capacity = 0;
  };
  std::vector<Length> lengths = {};
};

struct Routed {
  Tensor chosen;                     // int32 (N, k): experts, the best first
  Tensor place;                      // int32 (N, k): the row of each choice, -1 where it was dropped
  Tensor weights;                    // (N, k), float32, or float64 for float64
  std::vector<int64_t> counts = {};  // rows of each expert
  int64_t rows = 0, dropped = 0;     // rows of all experts, and choices dropped
  // float64 (sequences, E): choices, dropped ones too. The caller adds those of the tokens that are elsewhere.
  Tensor of_sequences = {};
  // With `given`: tokens that the logits would have sent to other experts, and the most by which the logit of an expert
  // that was left out is above that of the given one, by the largest logit.
  int64_t elsewhere = 0;
  double margin = 0;
};

// logits (N, E) of a floating dtype. Throws Error unless 1 <= per_token <= E and the sequences divide N. Cost: N E
// exponentials.
Routed route(const Tensor& logits, const RouteOptions& options);
// The gradient of the logits: that of the weights `dweights` (N, k), and of the losses above.
Tensor route_backward(const Tensor& dweights, const Tensor& logits, const Routed& routed, const RouteOptions& options);

// x (N, C) -> (R, C). Cost: one pass over the rows.
Tensor dispatch_rows(const Tensor& x, const Routed& routed);
// drows (R, C) -> dx (N, C), summed in the order of choices.
Tensor dispatch_rows_backward(const Tensor& drows, const Routed& routed);
// rows (R, C), weights as in `routed` -> (N, C), rounded once. Throws Error for another number of rows.
Tensor combine_rows(const Tensor& rows, const Tensor& weights, const Routed& routed);
struct CombineGrads {
  Tensor rows, weights;
};
CombineGrads combine_rows_backward(const Tensor& dy, const Tensor& rows, const Tensor& weights, const Routed& routed);

// Kernels of a GPU: operands are contiguous.
namespace cuda {
// Fills `out`, whose tensors of N rows are there; with `given`, `chosen` holds these.
void route(Routed& out, const Tensor& logits, const RouteOptions& options);
void route_backward(const Tensor& out, const Tensor& dweights, const Tensor& logits, const Routed& routed,
                    const RouteOptions& options);
void dispatch_rows(const Tensor& rows, const Tensor& x, const Tensor& place);
// With undefined weights these are 1.
void combine_rows(const Tensor& y, const Tensor& rows, const Tensor& weights, const Tensor& place);
void combine_rows_backward(const CombineGrads& out, const Tensor& dy, const Tensor& rows, const Tensor& weights,
                           const Tensor& place);
}  // namespace cuda

// Products of linear layers y = x w^T side by side, as the experts of a layer make them, each for as many rows as
// happen to come: rows of group 0, then those of group 1, and so on, and each group's own w.
//
// Each element is one chain of fused multiply-adds in the order of the inner dim (tensor/ops/matmul/cpu/products.h), so
// the bits of a row depend neither on how many rows and groups there are, nor on its place among them, nor on threads;
// and no kernel is compiled for a number of rows. bfloat16 is multiplied in float32 and rounded once. On a GPU all
// groups are one launch, and float32 and float64 have the bits of the CPU; bfloat16 goes through tensor cores, which
// add sixteen products at a time, in the order of the inner dim. No rows are right too: then the weight's gradient is
// zero. Cost: 2 R N K FLOPs.

struct GemmGroup {
  Tensor w;           // (N, K), of the dtype of the rows; or the gradient of such a weight
  int64_t rows = 0;   // that meet it
  bool adds = false;  // the gradient is added to what stands there, as add_() would
};

// x (R, K) -> (R, N).
Tensor grouped_linear(const Tensor& x, const std::vector<GemmGroup>& groups);
// dy (R, N) -> (R, K).
Tensor linear_rows_input_grad(const Tensor& dy, const std::vector<GemmGroup>& groups);
// dy^T x of each group's rows, in order, to its gradient: of any floating dtype, or undefined where nobody wants it.
void linear_rows_weight_grads(const std::vector<GemmGroup>& groups, const Tensor& dy, const Tensor& x);

enum class RowsProduct : uint8_t { forward, input_grad, weight_grad };

// Kernels of a GPU.
namespace cuda {
// other = left w^T, other = left w, or w = left^T other, for one of the three above, of contiguous matrices. Gradients
// are all of the dtype of the rows, or of its wide one. One launch for every 192 groups.
void multiply_rows(RowsProduct which, const Tensor& left, const Tensor& other, const std::vector<GemmGroup>& groups);
}  // namespace cuda

}  // namespace tessera
