// Plans of a ranking that are run here, each beside its prediction.
#pragma once
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

#include "planner/measured.h"
#include "planner/search.h"

namespace tessera {

struct MeasuredPlan {
  size_t number = 0;  // in the ranking, from 1
  planner::Layout layout = {};
  std::vector<planner::Compared> parts = {};
};

// Throws Error (usage) for a number that the ranking has not.
std::vector<MeasuredPlan> measure_plans(const planner::Question& question, const planner::Answer& found,
                                        const std::vector<int64_t>& numbers);

std::string measured_text(const MeasuredPlan& plan);
// {"event": "measured", "number": 1, "parts": [{"part": .., "predicted": .., "measured": .., "off": ..}, ..]}
nlohmann::ordered_json measured_json(const MeasuredPlan& plan);

}  // namespace tessera
