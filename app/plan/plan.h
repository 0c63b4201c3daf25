// `plan --cases`: predictions of given plans, without a search.
#pragma once
#include <memory>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <vector>

#include "planner/machine.h"
#include "planner/measured.h"
#include "planner/search.h"
#include "train/job.h"

namespace tessera {

// Prints one JSON object for each line of the file, in order. Throws Error and InputError that name the line.
int predict_cases(const std::string& path);

// This machine as the planner knows it: what was measured here and kept, or is measured now.

// The kept measurements of this machine: null where it has not been measured. A file that is damaged, or of another
// machine, counts as none.
std::shared_ptr<const planner::Machine> kept_here();
// It, measured where there is none or where it shall be `again`; standard error says what is done and why.
std::shared_ptr<const planner::Machine> measured_here(bool again);
// The figures that a person looks for first, and where the others are.
std::string machine_words(const planner::Machine& machine);

// Seconds of the job's step; nothing for a run that was not measured: on GPUs, of processes, without steps in common.
std::optional<double> predicted_step(const planner::Machine& machine, const Job& job);

// Plans of a ranking that are run here, each beside its prediction.

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
