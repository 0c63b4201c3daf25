// A plan that has not run, as far as theory knows it: for pictures that are the same everywhere.
#pragma once
#include <vector>

#include "app/options.h"
#include "app/report/record.h"

namespace tessera::report {

// Its schedule, what its ranks send in a step by closed forms, and what they hold: parameters, gradients and optimizer
// state by closed forms, the rest by a dry run. Nothing is computed, and no rank is started. Throws Error (usage) for a
// plan that cannot be.
Record planned(const TrainOptions& options);

// The plans that the words of a command line stand for: of one option there may be several values, 1f1b,zb-h1, which
// give one plan each, labelled with its value. Throws Error (usage).
std::vector<Record> planned(const Words& words);

}  // namespace tessera::report
