// The global 2-norm of the gradients, and the factor that clips it.
//
// The order of the sum is fixed by the units alone, so neither threads nor the way units are cut over ranks change a
// bit. A block is kNormBlock consecutive elements of a unit's flat gradients (its gaps are zero). Within it element i
// goes to lane i mod 16, in double, by fused multiply-adds; lanes are added in pairs 8, 4, 2, 1 apart. Block sums are
// added in order per unit, 256 at a time (a GPU has a thread for each such group), and the units' sums likewise.
// Ranks that hold shards cut at multiples of a block exchange block sums.
#pragma once

#include "nn/parameter.h"

namespace tessera {

inline constexpr int64_t kNormBlock = 256;

inline int64_t norm_blocks(int64_t elements) { return (elements + kNormBlock - 1) / kNormBlock; }
// The sum of squares of each block of a contiguous floating tensor, to the norm_blocks(numel) float64 numbers of `sums`
// on the same device.
void block_sums(const Tensor& grads, const Tensor& sums);
// Numbers in the order in which they are added: groups of kNormGroup, each in order, and then their sums in order.
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
// Numbers that are added so: `count` of them from `begin` on, then from `begin + stride` on, and so on.
struct BlockRun {
  int64_t begin = 0, count = 0, times = 1, stride = 0;
};
// The sum of each run of the float64 numbers `sums`, to `out`, one number for each, on the same device.
void ordered_sums(const Tensor& sums, std::span<const BlockRun> runs, const Tensor& out);

// The sum of the squares of each tensor, by its own blocks: of at least one tensor on one device, left there, float64
// (tensors).
Tensor sums_of_squares(std::span<const Tensor> tensors);

// The sum of the squares of all gradients. Infinity and NaN come out as they are. Cost: one read of the gradients.
double sum_of_squares(std::span<const FlatUnit> units);

// sqrt(sum_of_squares): exactly sqrt(N) for N gradients of one.
double grad_norm(std::span<const FlatUnit> units);

// min(1, max_norm / (norm + 1e-6)), PyTorch's rule; 1 when max_norm is 0 (clipping off). Throws Error when max_norm is
// negative. NaN gives NaN, so that a caller that did not look at the norm does not train on.
double clip_factor(double norm, double max_norm);
// The clip factor for a max_norm that was looked at, on the CPU and on a GPU.
constexpr double clipped(double norm, double max_norm) {
  if (max_norm == 0) return 1;
  const double factor = max_norm / (norm + 1e-6);
  return factor > 1 ? 1 : factor;
}

namespace cuda {
// Queues on the stream of the tensors' arena: sums_of_squares() of at least one tensor on one GPU, left
// there, float64 (tensors); ordered_sums() to float64 `out`, one number for each run.
void block_sums(const Tensor& grads, const Tensor& sums);
void ordered_sums(const Tensor& sums, std::span<const BlockRun> runs, const Tensor& out);
Tensor sums_of_squares(std::span<const Tensor> tensors);
}  // namespace cuda

}  // namespace tessera
