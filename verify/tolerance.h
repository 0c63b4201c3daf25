// How far a plan that splits sums may be from one rank.
//
// float64: 1e-12, relative, 2-norms, tensor by tensor. fp32 and bf16: k 1.03^L eps with L layers. k is calibrated in
// the same run, from the gradients of two serial runs that differ in nothing but the order of their sums (all sequences
// of a rank at once, and one after another): four times what the worst tensor shows in any step, at least 64 and at
// most 256, so that no calibration can excuse a defect. At least 64, since those two differ in sums over sequences
// alone (a batch of one has but one order), and a plan in sums over tokens and channels too: with AVX-512, whose
// products have other orders than AVX2's, a ring of two ranks with 4 channels came to 49. In fp32 also at least twice
// what the first of the two is from its gradients in float64: a gradient that is small beside what it is summed from,
// as that of the norm of keys, is that far off in any order, and so is the plan's.
#pragma once
#include <string>

#include "train/job.h"
#include "train/sequences.h"

namespace tessera {

struct Tolerance {
  double bound = 0;
  std::string text;  // how it came to be, for people
};

// `orders` and `error`: what two orders of sums, and float64, differ by from a serial run; float64 asks for neither.
Tolerance tolerance_of(DType dtype, int64_t layers, double orders, double error);
// Of the loss, the norm and the gradients of a step.
Tolerance tolerance_of(const Job& job, const Sequences& sequences);

}  // namespace tessera
