// Whether a case can be at all.
#pragma once
#include "planner/predict.h"

namespace tessera::planner {

// The case with what it leaves to choice chosen. Throws FieldError that names the field, what was expected and found.
Case checked_case(const Case& c);

}  // namespace tessera::planner
