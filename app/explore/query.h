// The words of a request as what the planner is asked, and its answers.
#pragma once
#include <nlohmann/json_fwd.hpp>

#include "app/explore/server.h"
#include "app/plan/text.h"
#include "planner/predict.h"

namespace tessera::explore {

// One plan of a model on some hardware. Throws FieldError for keys that are unknown or come twice, and for values that
// cannot be.
planner::Case case_of_query(const Request& request);
// The best plans of a model on some hardware, for `ranks` and a `batch`. Throws the same.
PlanAnswer answer_of_query(const Request& request);

// The sizes of a preset; one whose vocabulary is its tokenizer's has that of its family's usual one.
planner::ModelShape shape_of_preset(std::string_view name);
nlohmann::ordered_json to_json(const planner::ModelShape& shape);

}  // namespace tessera::explore
