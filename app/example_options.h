// What the options say of examples for fine-tuning, and what is said of the data of a run.
#pragma once
#include <string>

#include "app/options.h"
#include "data/examples.h"

namespace tessera {

ExampleOptions example_options(const TrainOptions& options);

// Throws Error (usage) for an option about examples beside data that has none.
void check_example_options(const TrainOptions& options);

std::string describe_data(const Dataset& dataset);

}  // namespace tessera
