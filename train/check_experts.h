// What models with experts can be trained under, and what `ep` can be.
#pragma once
#include "models/language_model.h"
#include "train/plan.h"

namespace tessera {

// Throws FieldError: the field, what was expected and found, and the nearest legal value.
void check_experts(const Plan& plan, const ModelConfig& model);

}  // namespace tessera
