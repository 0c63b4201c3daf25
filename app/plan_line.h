// The options of `plan` that no run has, and its examples.
#pragma once
#include "app/plan_options.h"

namespace CLI {
class App;
}

namespace tessera {

void add_plan(CLI::App& plan, PlanOptions& options);

}  // namespace tessera
