// What the page asks for, answered by the planner:
//
//   /          the page
//   /choices   the names that can be chosen, and what stands behind them
//   /predict   ?model=llama3-8b&hardware=h100&dp=2&pp=4&...: one plan, as `plan` prints it, and its pipeline's actions
//   /search    ?model=llama3-8b&hardware=h100&ranks=8&batch=256: the best plans
#pragma once
#include "app/explore/server.h"

namespace tessera::explore {

// What cannot be is answered with status 400 and {"error": .., "field": ..}. Reads no files and keeps nothing.
Answer answer(const Request& request);

}  // namespace tessera::explore
