// Tolerance of plans that split sums.
#pragma once
#include <cstdint>
#include <string>

#include "verify/verify.h"

namespace tessera {

// Relative tolerance (2-norms) of each tensor of a plan that splits sums: 1e-12 in float64; in fp32 and bf16 k 1.03^L
// eps with L layers. k is calibrated in the same run as four times the largest difference, over tensors and steps,
// between the gradients of two serial runs with different summation orders (all sequences of a rank at once, and one by
// one), clamped to [64, 256] so that no calibration can hide a fault. The minimum is needed because those orders differ
// only in sums over sequences, whereas a plan also reorders sums over tokens and channels: a ring of two ranks with 4
// channels reached 49 with AVX-512. In fp32 k is also at least twice the first serial run's error relative to float64:
// a gradient that is small compared with its addends, e.g. of the key norm, has this error in any order.
struct Tolerance {
  double bound = 0;
  std::string text;  // derivation, for display
};

// Relative differences between two summation orders, and from float64; unused for float64.
Tolerance compute_tolerance(DType dtype, int64_t layers, double orders, double error);
// For loss, norm and gradients of a step.
Tolerance compute_tolerance(const TrainConfig& job, const Sequences& sequences,
                            const Working& working = VerifyHooks().working);

}  // namespace tessera
