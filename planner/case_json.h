// Cases and predictions as JSON: what `plan` reads and prints.
#pragma once
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <string_view>

#include "planner/predict.h"

namespace tessera::planner {

// {"model": {..}, "plan": {..}, "hardware": NAME or {..}, "software": NAME or {..}}. Throws FieldError for keys that
// are unknown or missing and for values that cannot be, InputError for text that is no JSON object; `what` names it.
Case case_from_json(std::string_view text, const std::string& what);
// The object of a case's model alone.
ModelShape model_from_json(std::string_view text, const std::string& what);
nlohmann::ordered_json to_json(const Layout& layout);
// {"parameters": .., ..., "peak": ..}
nlohmann::ordered_json to_json(const MemoryParts& memory);
// {"event": "plan", "plan": {..}, "fits": true, "step_s": .., ...}
nlohmann::ordered_json to_json(const Case& c, const Prediction& p);

}  // namespace tessera::planner
