// Recomputation of a block: its activations are not kept; backward runs its forward again.
//
// Chen et al. 2016, "Training deep nets with sublinear memory cost". Randomness is counted, so the second forward draws
// the same dropout masks, and every op gives the same bits twice: gradients are bit for bit those of the plain block.
#pragma once
#include "autograd/var.h"

namespace tessera {

// f(inputs), keeping only the inputs. At least one input must require a gradient when gradients are on. Cost: one more
// forward pass of the block. With `drop_result` an op that saves the result for its backward keeps nothing either: it
// has it from that second forward pass, which then comes earlier.
Var checkpoint(const std::function<Var(const std::vector<Var>&)>& f, const std::vector<Var>& inputs,
               bool drop_result = false);

}  // namespace tessera
