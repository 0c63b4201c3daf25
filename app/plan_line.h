// The options of `plan` that no run has, and its examples.
#pragma once
#include <CLI/CLI.hpp>

#include "app/plan_options.h"

namespace tessera {

void add_plan(CLI::App& plan, PlanOptions& options);

}  // namespace tessera
