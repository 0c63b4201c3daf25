// The head of a language model and its loss in one pass: the cross-entropy of x w^T, whose logits never stand in memory
// whole. A block of rows at a time is multiplied, scored, turned into its own gradient in place, and multiplied into
// the gradients of x and w, so no product is made twice (the "fused linear cross-entropy" of Hsu et al. 2024, "Liger
// kernel").
//
// The blocks are a function of the sizes alone, and a weight's gradient is the sum over blocks in order, each made
// fresh and then added: whoever has the same rows gets the same bits, whatever the plan. The three *_by_rows()
// functions are the same products for those who need the logits whole (DataParallel), in the same blocks and with the
// same bits.
//
// For the host's memory. On a GPU, and where ranks share out the vocabulary, the logits stand whole.
#pragma once
#include <algorithm>

#include "tensor/ops/matmul/matmul.h"
#include "tensor/tensor.h"

namespace tessera {

// The most that a block's logits take: the larger, the fewer passes over the gradient of w; the smaller, the less
// memory. Measured in docs/measurements.md.
inline constexpr int64_t kLogitsBytes = int64_t{64} << 20;

// Rows [0, rows) in blocks of `block`, of which the last may be smaller.
struct RowBlocks {
  int64_t rows = 0, block = 0;
  bool one() const { return rows <= block; }
  template <class F>
  void for_each(const F& f) const {  // f(first row, number of rows)
    for (int64_t at = 0; at < rows; at += block) f(at, std::min(block, rows - at));
  }
};
// Of the product of x (..., K) and w (N, K)^T: equal ones where there is a number that divides the rows.
RowBlocks row_blocks(const Tensor& x, const Tensor& w, int64_t most_bytes = kLogitsBytes);

struct LinearCrossEntropy {
  double loss_sum = 0;  // over target tokens, each row's loss added in row order
  int64_t count = 0;    // target tokens
  Tensor sum;           // loss_sum: float64, ()
};
// The loss of x (N, C) w (V, C)^T for targets int32 (N), under the contract of cross_entropy(); and, times `scale`,
// the gradients of x and w into `dx` (N, C), of x's dtype, and `dw` (V, C), float32, or float64 for float64, where
// these are given. Cost: 2 N V C FLOPs, 6 with both gradients; of memory one block of logits.
LinearCrossEntropy linear_cross_entropy(const Tensor& x, const Tensor& w, const Tensor& targets, double scale,
                                        Tensor* dx, Tensor* dw, const RowBlocks& blocks, WeightPacks* packs = nullptr);

// linear(), linear_input_grad() and linear_weight_grad() of tensor/ops/matmul/matmul.h, of x (..., K) and dy (..., N).
Tensor linear_by_rows(const Tensor& x, const Tensor& w, const RowBlocks& blocks, WeightPacks* packs = nullptr);
Tensor linear_input_grad_by_rows(const Tensor& dy, const Tensor& w, const RowBlocks& blocks,
                                 WeightPacks* packs = nullptr);
void linear_weight_grad_by_rows(Tensor& dw, const Tensor& dy, const Tensor& x, const RowBlocks& blocks);

}  // namespace tessera
