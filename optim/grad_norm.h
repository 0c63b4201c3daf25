// The global 2-norm of the gradients, and the factor that clips it.
//
// The order of the sum is fixed by the parameters alone, so threads, and the way parameters are gathered into units, do
// not change a bit. A block is 256 consecutive elements of one slot, counted from the slot's first element. Within it
// element i goes to lane i mod 16, in double, by fused multiply-adds; lanes are added in pairs 8, 4, 2, 1 apart. Block
// sums are added in order per slot, and the slots' sums in order of units and slots.
#pragma once
#include <span>

#include "nn/flat.h"

namespace tessera {

inline constexpr int64_t kNormBlock = 256;

// The sum of the squares of all gradients in slots. Of a unit that is a shard, the elements it holds, in the blocks and
// lanes of the whole slot. Infinity and NaN come out as they are. Cost: one read of the gradients.
double sum_of_squares(std::span<const FlatUnit> units);

// sqrt(sum_of_squares): exactly sqrt(N) for N gradients of one.
double grad_norm(std::span<const FlatUnit> units);

// min(1, max_norm / (norm + 1e-6)), PyTorch's rule; 1 when max_norm is 0 (clipping off). Throws Error when max_norm is
// negative. NaN gives NaN, so that a caller that did not look at the norm does not train on.
double clip_factor(double norm, double max_norm);

}  // namespace tessera
