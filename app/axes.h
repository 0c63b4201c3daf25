// The axes of the mesh that the options mean: how many ranks each has.
#pragma once
#include "app/options.h"

namespace tessera {

// From the outermost to the innermost, whose ranks are neighbours.
struct Axes {
  int64_t pp = 1, dp = 1, cp = 1, tp = 1;
  int64_t ranks() const { return pp * dp * cp * tp; }
  bool operator==(const Axes&) const = default;
};

// What is not given follows from the number of ranks (--ranks, or an MPI job's): --dp does, or, when that is given, the
// only other axis that is not. Otherwise it is 1; with no word about ranks at all, two data-parallel ranks where the
// machine and the batch allow it. May be a mesh of another number of ranks, which check_plan() refuses.
Axes axes_of(const TrainOptions& options);
// The number of ranks that is given, by an MPI job or --ranks; 0 when none is.
int64_t given_ranks(const TrainOptions& options);

// "2 or 4": the divisors of n next to `wanted`.
std::string divisors_near(int64_t n, int64_t wanted);
// "8 or 12": the multiples of n next to `wanted`.
std::string multiples_near(int64_t n, int64_t wanted);

}  // namespace tessera
