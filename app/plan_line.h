// The options of `plan` that no run has, and its examples.
#pragma once
#include <CLI/CLI.hpp>

#include "app/plan_options.h"
#include "tensor/findings.h"

namespace tessera {

void add_plan(CLI::App& plan, PlanOptions& options, Findings& wrong);

}  // namespace tessera
