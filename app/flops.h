// How much a model computes, and how much this machine can.
#pragma once
#include "models/gpt.h"

namespace tessera {

// Of training: 6 per weight in a product and 12 L C T of attention. Of a whole model.
double flops_per_token(Gpt& model);
// The best rate, in FLOP/s, of a few matrix products (of 1024^3; on a GPU, of a millisecond), on the device of the
// arena: what the model's use of the machine is measured against.
double measured_peak_flops(DType dtype, const ArenaPtr& arena);

}  // namespace tessera
