// The command that trains under a plan.
#pragma once
#include <string>

#include "app/plan_options.h"
#include "planner/search.h"

namespace tessera {

// "tessera train --model llama2-7b ... --tp 2 --device cuda ...", with mpirun in front of it for several nodes; for a
// shell, and for train's own checks. Nothing for a model with experts, which `train` has not.
std::string train_command(const PlanOptions& options, const planner::Question& question, const planner::Layout& layout);

}  // namespace tessera
