// Options of examples for fine-tuning, and the lines that describe the data of a run.
#pragma once
#include <string>
#include <vector>

#include "app/options.h"
#include "data/examples.h"

namespace tessera {

ExampleOptions example_options(const TrainOptions& options);

// Opens the data that `data` names: a dataset, examples, or a mixture of either. Throws as dataset_for(),
// load_examples() and mixed() do.
Dataset open_data(const TrainOptions& options, const TokenizerChoice& tokenizer);

// Throws Error (usage) for an option about examples beside data that has none.
void check_example_options(const TrainOptions& options);

// Lines about it; of a mixture, one for each part.
std::vector<std::string> describe_data(const Dataset& dataset);

}  // namespace tessera
