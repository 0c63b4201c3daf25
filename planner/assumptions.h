// What a prediction rests on, and which of it decides between plans.
#pragma once
#include <optional>
#include <string>

#include "planner/search.h"

namespace tessera::planner {

// The assumption that changes the winner among the plans of an answer when it is wrong by the smallest factor.
struct Turn {
  std::string what;
  double factor = 1;
  bool larger = false;     // than it is assumed
  Hardware hardware = {};  // as it would be then
  size_t winner = 0;       // then, of the answer's best
};
// Each is varied alone, up to four times larger and smaller; nothing where none of these changes the winner.
std::optional<Turn> nearest_turn(const Question& question, const Answer& answer);
// The same in words.
std::string weakest_assumption(const Question& question, const Answer& answer);

}  // namespace tessera::planner
