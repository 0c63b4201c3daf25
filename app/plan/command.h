// The planner's answer to a question, with the command that trains under the plan that it recommends.
#pragma once
#include <string>

#include "app/options.h"
#include "app/plan/text.h"

namespace tessera {

// "tessera train --model llama2-7b ... --tp 2 --device cuda ...", with mpirun in front of it for several nodes; for a
// shell, and for train's own checks.
std::string train_command(const PlanOptions& options, const planner::Question& question, const planner::Layout& layout);

// The best `top` plans. Throws FieldError where there can be none.
PlanAnswer answer_of(const PlanOptions& options, PlanQuestion asked);

}  // namespace tessera
