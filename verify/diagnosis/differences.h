// Differences of numbers from the oracle's, as observations of a diagnosis.
#pragma once

#include "tensor/tensor.h"
#include "verify/diagnosis/diagnosis.h"
#include "verify/reference.h"

namespace tessera {

struct Compared {
  Tensor found, expected;  // they have one shape, are contiguous, on the host
  Tensor before = {};      // values before the step; undefined: not known
  Tensor owners = {};      // int32: the rank that each element was taken from; undefined: rank 0
  double tolerance = 0;    // the most of |found - expected|, relative to the largest |expected|
};
// The difference of a tensor, without step, kind, name and distance.
TensorDifference compute_difference(const Compared& pair);

// Whether most of what is wrong in `found` are values of `expected`, in other places.
bool are_permuted(const std::vector<Compared>& pairs);

// `found` as a sum of the gradients of the batch's sequences, in the order of the oracle's trained units and slots. The
// oracle has the state in which the step began, and its gradients when it comes back. Nothing where the batch is too
// large to be looked at one by one. Cost: as many forward and backward passes as the batch has sequences.
std::optional<Mixture> find_mixture(Reference& reference, int64_t batch, const std::vector<NamedTensor>& found);

}  // namespace tessera
