// JSON input and output of `plan`.
#pragma once
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <string_view>

#include "planner/predict.h"

namespace tessera::planner {

// {"model": {..}, "plan": {..}, "hardware": NAME or {..}, "software": NAME or {..}}. Throws FieldError for unknown or
// missing keys and invalid values; InputError if the text, named by `what`, is not a JSON object.
Case case_from_json(std::string_view text, const std::string& what);
// From the model object of a case.
ModelShape model_from_json(std::string_view text, const std::string& what);
nlohmann::ordered_json to_json(const Layout& layout);
nlohmann::ordered_json to_json(const MemoryParts& memory);
// {"event": "plan", "plan": {..}, "fits": true, "step_s": .., ...}
nlohmann::ordered_json to_json(const Case& c, const Prediction& p);

}  // namespace tessera::planner
