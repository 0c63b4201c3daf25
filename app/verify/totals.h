// The bounds of a whole run: bytes and memory against the closed forms, and that there was something to see.
#pragma once
#include "app/verify/verify.h"

namespace tessera {

// Adds a line to result.failures for each bound that is broken.
void check_totals(VerifyResult& result, const TrainOptions& options);

}  // namespace tessera
