// How much this machine can compute.
#pragma once
#include "tensor/arena.h"
#include "tensor/dtype.h"

namespace tessera {

// The best rate, in FLOP/s, of a few matrix products (of 1024^3; on a GPU, of a millisecond), on the device of the
// arena: what the model's use of the machine is measured against.
double measured_peak_flops(DType dtype, const ArenaPtr& arena);

}  // namespace tessera
