// What is wrong with one tensor.
#pragma once
#include <cstdint>
#include <vector>

#include "tensor/tensor.h"
#include "verify/observations.h"

namespace tessera {

struct Compared {
  Tensor found, expected;  // of one shape, contiguous, on the host
  Tensor before = {};      // of the step before; undefined: not known
  Tensor owners = {};      // int32: the rank that each element was taken from; undefined: rank 0
  double tolerance = 0;    // of |found - expected|, relative to the largest |expected|
};
// All but step, kind, name and distance.
TensorDifference difference_of(const Compared& pair);

// Whether most of what is wrong in `found` are values of `expected`, in other places.
bool are_permuted(const std::vector<Compared>& pairs);

}  // namespace tessera
