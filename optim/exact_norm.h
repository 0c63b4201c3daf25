// Exact sums of squares: the gradient norm of layout-invariant runs (docs/layout_invariant.md).
//
// A sum is stored in bins, each an integer multiple of a power of two: a square contributes to a bin its value rounded
// to that power, and the remainder to the next bins (Demmel and Nguyen 2013, "Fast reproducible floating-point
// summation"; Neal 2015, "Fast exact summation using small and large superaccumulators"). All additions are exact, so
// neither their order nor the distribution of the elements over ranks has an effect.
#pragma once
#include <array>
#include <cstdint>
#include <span>

#include "nn/parameter.h"

namespace tessera {

inline constexpr int kExactBins = 104;
using ExactSum = std::array<double, kExactBins>;  // adding two sums bin by bin, in any order, is exact

// Adds the squares of a contiguous floating tensor in host memory: at most 2^32 elements per sum. A square above 2^989
// counts as infinite.
void add_squares(ExactSum& sum, const Tensor& x);
// Rounded to float64.
double total(const ExactSum& sum);
double exact_grad_norm(std::span<const FlatUnit> units);

}  // namespace tessera
