// Which sequences a gradient is made of.
#pragma once
#include <optional>
#include <vector>

#include "optim/optimizer.h"
#include "verify/observations.h"
#include "verify/reference.h"

namespace tessera {

// `found` as a sum of the gradients of the batch's sequences, in the order of the oracle's trained units and slots. The
// oracle has the state in which the step began, and its gradients when it comes back. Nothing where the batch is too
// large to be looked at one by one. Cost: as many forward and backward passes as the batch has sequences.
std::optional<Mixture> mixture_of(Reference& reference, int64_t batch, const std::vector<NamedTensor>& found);

}  // namespace tessera
