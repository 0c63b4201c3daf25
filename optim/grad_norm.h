// Global 2-norm of the gradients, and the factor that clips it.
//
// The summation order depends only on the units, so the result is bitwise independent of threads and sharding. A block
// is kNormBlock consecutive elements of a unit's flat gradients (gaps are zero). Within it, element i is accumulated in
// lane i mod 16, in double, by fused multiply-adds; lanes are added pairwise at distances 8, 4, 2, 1. Block sums are
// added in order per unit, 256 at a time (one GPU thread per group), then the units' sums likewise. Ranks whose shards
// begin at multiples of a block exchange block sums.
#pragma once
#include <cstdint>
#include <span>

#include "nn/parameter.h"

namespace tessera {

inline constexpr int64_t kNormBlock = 256;

inline int64_t norm_blocks(int64_t elements) { return (elements + kNormBlock - 1) / kNormBlock; }
// Sum of squares of each block of a contiguous floating tensor; `sums` is float64 (norm_blocks(numel)) on the same
// device.
void block_sums(const Tensor& grads, const Tensor& sums);
// Block sums per group.
inline constexpr int64_t kNormGroup = 256;
class OrderedSum {
 public:
  void add(double x) {
    group_ += x;
    if (++count_ < kNormGroup) return;
    groups_ += group_;
    group_ = 0;
    count_ = 0;
  }
  double total() const { return groups_ + group_; }

 private:
  double groups_ = 0, group_ = 0;
  int64_t count_ = 0;
};
// `count` elements from `begin` on, then from `begin + stride`, and so on.
struct BlockRun {
  int64_t begin = 0, count = 0, times = 1, stride = 0;
};
// Writes the ordered sum of each run of float64 `sums` to one element of `out` on the same device.
void ordered_sums(const Tensor& sums, std::span<const BlockRun> runs, const Tensor& out);

// Sum of squares of each tensor, by blocks; at least one tensor, all on one device -> float64 (tensors) on that device.
Tensor sums_of_squares(std::span<const Tensor> tensors);

// Propagates infinity and NaN. Cost: one read of the gradients.
double sum_of_squares(std::span<const FlatUnit> units);

// Exactly sqrt(N) for N gradients equal to one.
double grad_norm(std::span<const FlatUnit> units);

// min(1, max_norm / (norm + 1e-6)), as in PyTorch; 1 if max_norm is 0 (no clipping). Throws Error if max_norm is
// negative. NaN propagates, so that training cannot silently continue.
double clip_factor(double norm, double max_norm);
// For a validated max_norm, on CPU and GPU.
constexpr double clipped(double norm, double max_norm) {
  if (max_norm == 0) return 1;
  const double factor = max_norm / (norm + 1e-6);
  return factor > 1 ? 1 : factor;
}

namespace cuda {
// Queued on the stream of the tensors' arena.
void block_sums(const Tensor& grads, const Tensor& sums);
void ordered_sums(const Tensor& sums, std::span<const BlockRun> runs, const Tensor& out);
Tensor sums_of_squares(std::span<const Tensor> tensors);
}  // namespace cuda

}  // namespace tessera
