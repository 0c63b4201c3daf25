// The words of a request as what the planner is asked.
#pragma once
#include <cstdint>
#include <nlohmann/json_fwd.hpp>

#include "app/explore/server.h"
#include "planner/predict.h"

namespace tessera::explore {

// One plan of a model on some hardware. Throws FieldError for keys that are unknown or come twice, and for values that
// cannot be.
planner::Case case_of_query(const Request& request);
// A model, hardware and software, with `ranks` and `batch` beside them.
struct Asked {
  planner::Case what = {};  // without a layout
  int64_t ranks = 1, batch = 1;
};
Asked question_of_query(const Request& request);

// The sizes of a preset; one whose vocabulary is its tokenizer's has that of its family's usual one.
planner::ModelShape shape_of_preset(std::string_view name);
nlohmann::ordered_json to_json(const planner::ModelShape& shape);

}  // namespace tessera::explore
