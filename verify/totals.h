// The bounds of a whole run: bytes and memory against the closed forms, and that there was something to see.
#pragma once
#include "verify/verify.h"

namespace tessera {

// 2% and a few small arrays over what is expected of a peak, which no formula gives to the byte.
int64_t peak_bound(int64_t expected);

// Adds a line to result.failures for each bound that is broken.
void check_totals(VerifyResult& result, const Plan& plan);

}  // namespace tessera
