// Checks of a plan's data axis, and of the updates of its parameters.
#pragma once
#include <span>

#include "models/language_model.h"
#include "train/checkpoint/state.h"
#include "train/job.h"
#include "train/plan.h"

namespace tessera {

// Throw FieldError.
void check_data(const Plan& plan);
void check_modes(const Plan& plan);
void check_updates(const Job& job);

// Checks of what ranks hold: for infinities and NaNs, and for copies that have drifted apart.

// Throws Error (not_finite) naming the tensor and the step when it has an infinity or a NaN. Cost: reads all of it.
void check_finite(const std::string& name, const Tensor& x, int64_t step);
// The place of the first element that is an infinity or a NaN, -1 where there is none.
int64_t first_not_finite(DType dtype, std::span<const std::byte> elements);

// Every rank calls it. Where several ranks hold the same elements of parameters or of optimizer state, over whichever
// axes of the mesh, these must be equal to the last bit. Throws Error (communication) naming the tensor, the step, the
// ranks, and those in the minority where there is one. Cost: reads and hashes all that a rank holds; one all_gather of
// 16 bytes per tensor.
void check_replicas(Trainer& trainer);

// Checks of plans for models with experts, and of `ep`.

// Throws FieldError: the field, what was expected and found, and the nearest legal value.
void check_experts(const Plan& plan, const ModelConfig& model);

}  // namespace tessera
