// How far a plan that splits sums may be from one rank.
//
// float64: 1e-12, relative, 2-norms, tensor by tensor. fp32 and bf16: k 1.03^L eps with L layers. k is calibrated in
// the same run, from the gradients of two serial runs that differ in nothing but the order of their sums (all sequences
// of a rank at once, and one after another): four times what the worst tensor shows, at least 32 (a batch of one
// sequence has but one order) and at most 256, so that no calibration can excuse a defect.
#pragma once
#include <string>

#include "app/options.h"
#include "app/sequences.h"

namespace tessera {

struct Tolerance {
  double bound = 0;
  std::string text;  // how it came to be, for people
};

// Of the loss, the norm and the gradients of a step.
Tolerance tolerance_of(const TrainOptions& options, const Sequences& sequences);

}  // namespace tessera
