// The order in which a plan sums gradients, told to the oracle.
#pragma once
#include "train/trainer.h"
#include "verify/reference.h"

namespace tessera {

// On rank 0 of the world the order of all its ranks; every rank calls it.
SumOrder order_of_sums(Trainer& trainer);

}  // namespace tessera
