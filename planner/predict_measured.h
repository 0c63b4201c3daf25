// A step on this machine, from what was measured here: kernels by their sizes, ranks that share processors and memory.
// With a GPU nothing of this is asked: its figures are those of its data sheet.
#pragma once
#include <memory>

#include "planner/machine.h"
#include "planner/predict.h"

namespace tessera::planner {

// This machine as ranks see it, for products of this type; each has an equal part of the memory.
Hardware hardware_of(const std::shared_ptr<const Machine>& machine, DType dtype);

// The times of a prediction: the step, its parts, its stages and the bubble. The type is the one that the software
// keeps.
void set_measured_times(const Case& c, const Machine& machine, Prediction& out);

}  // namespace tessera::planner
