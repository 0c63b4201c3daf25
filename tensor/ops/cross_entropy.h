// Cross-entropy over a vocabulary, which may be sharded.
#pragma once
#include <algorithm>
#include <cstdint>

#include "tensor/ops/matmul/matmul.h"

namespace tessera {

struct VocabShard {
  int64_t first = 0, total = 0;  // total: vocabulary size; 0: unsharded
};

// Cross-entropy of logits with integer targets, in cache-sized vocabulary blocks.
//
// The softmax is never stored: forward saves each row's log-sum-exp, computed with an online maximum (Milakov and
// Gimelshein 2018); backward overwrites the logits with their gradients.

inline constexpr int32_t kIgnoredTarget = -1;

struct CrossEntropy {
  DeviceScalar loss_sum;  // over target tokens, in row order
  DeviceScalar count;     // of rows whose target is not kIgnoredTarget
  Tensor lse;             // (N): log-sum-exp; float32, or float64 for float64
  Tensor sum;             // loss_sum on the logits' device: float64, (); read-only
};

// targets int32 (N) on the logits' device; others are range-checked and copied. `vocab`: size of the full vocabulary.
Tensor targets_on_device(const Tensor& logits, const Tensor& targets, int64_t vocab);

// logits (N, V), targets int32 (N) in [0, V) or kIgnoredTarget. Throws Error naming the row of an invalid target. On a
// GPU the targets must be on the same device, losses are summed in blocks of 4096 rows, and the host does not wait.
// Cost: one read of the logits.
CrossEntropy cross_entropy(const Tensor& logits, const Tensor& targets);

// Overwrites unshared logits with the result of cross_entropy_backward(). Cost on a GPU, if a row fits into shared
// memory: one read and one write of the logits.
CrossEntropy cross_entropy_in_place(Tensor& logits, const Tensor& targets, double scale);
// x (N, V) *= factor, a float64 () on the same device; no-op on a GPU if the factor is 1.
void scale_rows_(Tensor& x, const Tensor& factor);

// number * times; `times`, if defined, is a float64 () on the logits' device, so that the host need not read it.
struct GradientScale {
  GradientScale(double factor, Tensor of_output = {}) : number(factor), times(std::move(of_output)) {}  // NOLINT
  double number;
  Tensor times;
};

// dlogits = (softmax - onehot(target)) * scale, zero in ignored rows. Overwrites the logits if their storage is not
// shared.
Tensor cross_entropy_backward(Tensor&& logits, const Tensor& targets, const Tensor& lse, const GradientScale& scale,
                              const VocabShard& shard = {});

// Partial results (N) of a vocabulary shard, float32 (float64 for float64): reduce `row_max` over shards by maximum,
// `row_sum_exp` and `target_logits` by sum.
Tensor row_max(const Tensor& logits);
// Sum of exp(logit - max); with `leaves` above 0, that many chunks of the vocabulary are added by a binary tree.
Tensor row_sum_exp(const Tensor& logits, const Tensor& max, int64_t leaves = 0);
// 0 if the target is in another shard. Throws like cross_entropy().
Tensor target_logits(const Tensor& logits, const Tensor& targets, const VocabShard& shard);
CrossEntropy joined_cross_entropy(const Tensor& max, const Tensor& sum_exp, const Tensor& own, const Tensor& targets);

struct Scored {
  const Tensor &logits, &targets, &lse;
};
// lse (N), losses float64 (2, N) with each row's loss and target count, and totals float64 (2), their sums in row order
// by blocks of 4096.
struct RowLosses {
  Tensor lse, losses, totals;
};
// These functions only queue kernels. Invalid targets are recorded (tensor/cuda/context.h) and their rows ignored.
namespace cuda {
RowLosses cross_entropy(const Tensor& logits, const Tensor& targets);
RowLosses cross_entropy_in_place(const Tensor& logits, const Tensor& targets, double scale);
void multiply_by(const Tensor& x, const Tensor& times);
RowLosses joined_cross_entropy(const Tensor& max, const Tensor& sum_exp, const Tensor& own, const Tensor& targets);
// dlogits may be the logits.
void cross_entropy_backward(const Tensor& dlogits, const Scored& of, const GradientScale& scale, const VocabShard& v);
void row_max(const Tensor& out, const Tensor& logits);
void row_sum_exp(const Tensor& out, const Tensor& logits, const Tensor& max);
void target_logits(const Tensor& out, const Tensor& logits, const Tensor& targets, const VocabShard& shard);
}  // namespace cuda

// Fused linear cross-entropy (Hsu et al. 2024, "Liger kernel"): head and loss of a language model without the full
// logits. Each block of rows of x w^T is computed, scored, overwritten with its gradient, and multiplied into the
// gradients of x and w.
//
// Blocks depend on the sizes alone, and a weight gradient is the sum of separately computed block gradients in order,
// so equal rows give bitwise identical results in every plan. The *_by_rows() functions compute bitwise identical
// matmuls for callers that need the full logits (DataParallel).
//
// CPU only. On a GPU, and with a sharded vocabulary, the full logits are stored.

// Maximum bytes of a block's logits: a tradeoff between memory and passes over the gradient of w
// (docs/measurements/cpu_training.md).
inline constexpr int64_t kLogitsBytes = int64_t{64} << 20;

struct RowBlocks {
  int64_t rows = 0, block = 0;
  bool one() const { return rows <= block; }
  template <class F>
  void for_each(const F& f) const {  // f(first row, number of rows)
    for (int64_t at = 0; at < rows; at += block) f(at, std::min(block, rows - at));
  }
};
// Blocks of equal size if some block count divides the rows.
RowBlocks row_blocks(const Tensor& x, const Tensor& w, int64_t max_bytes = kLogitsBytes);

struct LinearCrossEntropy {
  double loss_sum = 0;
  int64_t count = 0;
  Tensor sum;
};
// Loss of x (N, C) w (V, C)^T for targets int32 (N). `dx` (N, C), of x's dtype, and `dw` (V, C), float32 (float64 for
// float64), if not null, receive the gradients times `scale`. Cost: 2 N V C FLOPs, 6 N V C with both gradients; memory
// for one block of logits.
LinearCrossEntropy linear_cross_entropy(const Tensor& x, const Tensor& w, const Tensor& targets, double scale,
                                        Tensor* dx, Tensor* dw, const RowBlocks& blocks,
                                        PackedWeights* packs = nullptr);

// linear() and linear_input_grad() in row blocks: x (..., K), dy (..., N).
Tensor linear_by_rows(const Tensor& x, const Tensor& w, const RowBlocks& blocks, PackedWeights* packs = nullptr);
Tensor linear_input_grad_by_rows(const Tensor& dy, const Tensor& w, const RowBlocks& blocks,
                                 PackedWeights* packs = nullptr);
void linear_weight_grad_by_rows(Tensor& dw, const Tensor& dy, const Tensor& x, const RowBlocks& blocks);

}  // namespace tessera
