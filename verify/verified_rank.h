// A rank of the plan next to the oracle.
#pragma once
#include "verify/verify.h"

namespace tessera {

// Runs all steps of a rank of the plan, with the oracle on rank 0.
void run_with_oracle(const TrainConfig& job, Communicator& world, const Sequences& sequences, const VerifyHooks& hooks,
                     VerifyResult& result);

}  // namespace tessera
