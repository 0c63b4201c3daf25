// The data of a command: its tokenizer, the options of examples, and a description for the user.
#pragma once
#include <optional>
#include <string>
#include <vector>

#include "data/examples.h"
#include "train/config.h"

namespace tessera {

// The tokenizer selected by --tokenizer. bpe-N is a bpe tokenizer of at most N tokens, trained with a progress display.
// Throws Error (usage) if `name` is neither a kind of tokenizer nor a folder.
TokenizerChoice tokenizer_choice(const std::optional<std::string>& name, const std::string& otherwise, bool quiet);

ExampleOptions example_options(const TrainConfig& config);

// Throws Error (usage) for an option about examples if the data contain none.
void check_example_options(const DataConfig& data);

std::vector<std::string> describe_data(const Dataset& dataset);

}  // namespace tessera
