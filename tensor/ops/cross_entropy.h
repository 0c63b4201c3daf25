// Which entries of a vocabulary a table or a row of logits has, where other ranks have the rest.
#pragma once

#include "tensor/ops/matmul/matmul.h"

namespace tessera {

// The part of the vocabulary that is here: its n rows or columns are entries [first, first + n) of `whole`.
struct VocabPart {
  int64_t first = 0, whole = 0;  // whole 0: they are all there are
};

// Cross-entropy of logits with integer targets, by blocks of the vocabulary, in place backward.
//
// The softmax is never stored: forward keeps one number per row, the log of its denominator, found with an online
// maximum (Milakov and Gimelshein 2018) over blocks that stay in cache; backward turns the logits into their own
// gradients.

inline constexpr int32_t kIgnoredTarget = -1;

struct CrossEntropy {
  DeviceScalar loss_sum;  // over target tokens, each row's loss added in row order
  DeviceScalar count;     // target tokens: rows whose target is not kIgnoredTarget
  Tensor lse;             // (N): log of the sum of the exponentials; float32, or float64 for float64
  Tensor sum;             // loss_sum where the logits lie: float64, (); not to be written over
};

// The targets, int32 (N), where the logits lie. If that is elsewhere they are checked and copied; `vocab` is that of
// all parts.
Tensor targets_beside(const Tensor& logits, const Tensor& targets, int64_t vocab);

// logits (N, V), targets int32 (N) in [0, V) or kIgnoredTarget. Throws naming the row of a target outside. On a GPU the
// targets lie there too, losses are added by blocks of 4096 rows, and nothing waits. Cost: one read of the logits.
CrossEntropy cross_entropy(const Tensor& logits, const Tensor& targets);
// Cross-entropy of rows that follow others, in the host's memory: loss_sum goes on from `before`, so that blocks of
// rows add up to the bits of all rows at once.
CrossEntropy cross_entropy_after(double before, const Tensor& logits, const Tensor& targets);

// Cross-entropy of logits that nobody else holds; these become their own gradients times `scale`, as by
// cross_entropy_backward(). Cost: on a GPU, where a row fits into shared memory, one read and one write of the logits.
CrossEntropy cross_entropy_in_place(Tensor& logits, const Tensor& targets, double scale);
// x (N, V) times a number that lies beside it: float64, (). On a GPU nothing is read or written where that is one.
void scale_rows_(Tensor& x, const Tensor& factor);

// The number of target tokens among targets int32 (N) in the host's memory. Throws naming the row of one outside.
int64_t check_targets(const Tensor& targets, int64_t vocab);

// The factor of gradients: a number, times another one, float64 (), where that is defined. It lies beside the logits,
// so that on a GPU nobody has to read it.
struct GradientScale {
  GradientScale(double factor, Tensor of_output = {}) : number(factor), times(std::move(of_output)) {}  // NOLINT
  double number;
  Tensor times;
};

// dlogits = (softmax - onehot(target)) * scale, zero in ignored rows. Writes over the logits when their storage is held
// by nobody else.
Tensor cross_entropy_backward(Tensor&& logits, const Tensor& targets, const Tensor& lse, const GradientScale& scale,
                              const VocabPart& part = {});

// Results of one part of the vocabulary: each is (N), float32, or float64 for float64, and is put together
// with those of the other parts before it is used: the largest of `row_max`, the sums of `row_sum_exp` and
// `target_logits`.
Tensor row_max(const Tensor& logits);
Tensor row_sum_exp(const Tensor& logits, const Tensor& max);  // the sums of exp(logit - max)
// The target's logit in rows whose target is in this part, zero elsewhere. Throws like cross_entropy().
Tensor target_logits(const Tensor& logits, const Tensor& targets, const VocabPart& part);
CrossEntropy joined_cross_entropy(const Tensor& max, const Tensor& sum_exp, const Tensor& own, const Tensor& targets);

// The operands of kernels, checked and contiguous.
struct Scored {
  const Tensor &logits, &targets, &lse;
};
// The loss as a GPU computes it: lse (N) and totals float64 (2): the sum of the rows' losses, in row order by blocks of
// 4096 as in cuda::sums(), and the number of target tokens. `losses` float64 (2, N) are the rows' own.
struct RowLosses {
  Tensor lse, losses, totals;
};
// Everything here is queued; nothing waits. A target outside is noted (tensor/cuda/context.h), and its row left out.
namespace cuda {
RowLosses cross_entropy(const Tensor& logits, const Tensor& targets);
// The same, and the logits become their own gradients, times `scale`.
RowLosses cross_entropy_in_place(const Tensor& logits, const Tensor& targets, double scale);
void multiply_by(const Tensor& x, const Tensor& times);  // x (N, V) times a float64 () on the GPU
RowLosses joined_cross_entropy(const Tensor& max, const Tensor& sum_exp, const Tensor& own, const Tensor& targets);
// dlogits may be the logits.
void cross_entropy_backward(const Tensor& dlogits, const Scored& of, const GradientScale& scale, const VocabPart& part);
void row_max(const Tensor& out, const Tensor& logits);
void row_sum_exp(const Tensor& out, const Tensor& logits, const Tensor& max);
void target_logits(const Tensor& out, const Tensor& logits, const Tensor& targets, const VocabPart& part);
}  // namespace cuda

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

// The most that a block's logits take: the larger, the fewer passes over the gradient of w; the smaller, the less
// memory. Measured in docs/measurements/cpu_training.md.
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
// The blocks for the product of x (..., K) and w (N, K)^T: equal ones where there is a number that divides the rows.
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
                                        Tensor* dx, Tensor* dw, const RowBlocks& blocks,
                                        PackedWeights* packs = nullptr);

// linear(), linear_input_grad() and linear_weight_grad() of tensor/ops/matmul/matmul.h, of x (..., K) and dy (..., N).
Tensor linear_by_rows(const Tensor& x, const Tensor& w, const RowBlocks& blocks, PackedWeights* packs = nullptr);
Tensor linear_input_grad_by_rows(const Tensor& dy, const Tensor& w, const RowBlocks& blocks,
                                 PackedWeights* packs = nullptr);
void linear_weight_grad_by_rows(Tensor& dw, const Tensor& dy, const Tensor& x, const RowBlocks& blocks);

}  // namespace tessera
