// What a prediction rests on, and which of it decides between plans.
#pragma once
#include <string>

#include "planner/search.h"

namespace tessera::planner {

// The assumption that changes the winner among the plans of the answer when it is wrong by the smallest factor: what it
// is, the factor, and who wins then. Each is varied alone, up to four times more and less.
std::string weakest_assumption(const Question& question, const Answer& answer);

}  // namespace tessera::planner
