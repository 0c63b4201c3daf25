// Cross-entropy on a GPU. Operands as those of tensor/ops/cross_entropy.h, checked and contiguous, targets on the GPU.
//
// Everything here is queued; nothing waits. A target outside is noted (cuda/indices.h), and its row left out.
#pragma once
#include "tensor/ops/cross_entropy.h"

namespace tessera::cuda {

// lse (N) and totals float64 (2): the sum of the rows' losses, in row order by blocks of 4096 as in cuda::sums(), and
// the number of target tokens. `losses` float64 (2, N) are the rows' own.
struct RowLosses {
  Tensor lse, losses, totals;
};
RowLosses cross_entropy(const Tensor& logits, const Tensor& targets);
// The same, and the logits become their own gradients, times `scale`.
RowLosses cross_entropy_in_place(const Tensor& logits, const Tensor& targets, double scale);
void multiply_by(const Tensor& x, const Tensor& times);  // x (N, V) times a float64 () on the GPU
RowLosses joined_cross_entropy(const Tensor& max, const Tensor& sum_exp, const Tensor& own, const Tensor& targets);
struct Scored {
  const Tensor &logits, &targets, &lse;
};
// dlogits may be the logits.
void cross_entropy_backward(const Tensor& dlogits, const Scored& of, const GradientScale& scale, const VocabPart& part);
void row_max(const Tensor& out, const Tensor& logits);
void row_sum_exp(const Tensor& out, const Tensor& logits, const Tensor& max);
void target_logits(const Tensor& out, const Tensor& logits, const Tensor& targets, const VocabPart& part);

}  // namespace tessera::cuda
