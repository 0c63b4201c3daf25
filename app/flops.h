// How much this machine can compute.
#pragma once
#include <cstdint>

#include "tensor/arena.h"
#include "tensor/dtype.h"

namespace tessera {

// The best rate, in FLOP/s, of a few matrix products (of 1024^3; on a GPU, of a millisecond), on the device of the
// arena: what the model's use of the machine is measured against.
double measured_peak_flops(DType dtype, const ArenaPtr& arena);

// How many of the thread ranks compute at the same time: where they are more than the machine's processors, of which
// each uses `each`, or than its GPUs, they take turns.
int64_t ranks_at_once(int64_t ranks, int64_t processors, int64_t each);

}  // namespace tessera
