// Differences from the oracle, from which the diagnosis infers a cause.
#pragma once
#include <cstdint>
#include <optional>
#include <vector>

#include "tensor/tensor.h"
#include "verify/diagnosis/diagnosis.h"
#include "verify/reference.h"

namespace tessera {

struct Compared {
  Tensor found, expected;  // same shape, contiguous, on the host
  Tensor before = {};      // values before the step; undefined: unknown
  Tensor owners = {};      // int32: source rank of each element; undefined: rank 0
  double tolerance = 0;    // maximum |found - expected|, relative to the largest |expected|
};
// Leaves step, kind, name and distance unset.
TensorDifference compute_difference(const Compared& pair);

// Whether most wrong elements of `found` are values of `expected` at other positions.
bool are_permuted(const std::vector<Compared>& pairs);

// Least-squares weights of the columns in `found`, and the residual.
Mixture fit_mixture(const std::vector<std::vector<double>>& columns, const std::vector<double>& found);

// Decomposes `found` into the gradients of the batch's sequences, in the order of the oracle's trained units and slots.
// The oracle must be in the state at the beginning of the step; its gradients are preserved. nullopt for large batches.
// Cost: one forward and backward pass per sequence.
std::optional<Mixture> find_mixture(Reference& reference, int64_t batch, const std::vector<NamedTensor>& found);

}  // namespace tessera
