// Completes typed options to a configuration, rejects invalid combinations, and opens the data.
#pragma once
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "app/options.h"
#include "data/examples.h"

namespace tessera {

// Fills in preset sizes and mesh axes. A given number of ranks (--ranks or an MPI job) determines --dp or, if --dp is
// given, the only other axis without a value. All other axes are 1. Without rank options, the job uses two
// data-parallel ranks if the machine and the batch allow it. The mesh may have a different number of ranks, which
// check_plan() rejects. Throws Error (usage) for an unknown schedule.
TrainConfig resolve(const TypedOptions& typed);
// Whether the ranks will be processes rather than threads of this process.
bool starts_processes(const TypedOptions& typed);
// Throws Error (usage) naming options and the nearest valid values.
void check_plan(const TypedOptions& typed, const TrainConfig& config);
// Throws Error (usage) for `found` and invalid combinations of options. Individual values were checked when set.
void check(const TypedOptions& typed, const TrainConfig& config, ErrorList found = {});
// Calls resolve() and check(), and reports the errors of both.
TrainConfig checked(TypedOptions typed);
// Launch options of a command. All processes must run the same program and command with the same options, except output
// options.
LaunchOptions launch_options(const std::string& command, const TrainCommand& options, const Plan& plan);

// The default job of `train`: the model, tokenizer and learning rate with the lowest loss after about a minute on two
// cores. Options such as plan options or --steps modify it.
TypedOptions default_job();
// Whether `o` trains the model, data and tokenizer of the default job, under any plan and learning rate.
bool is_default_job(const TrainConfig& o);
// Whether an option of `train` with this value selects model, data, tokenizer or initial weights, so that the default
// job does not apply.
bool chooses_job(std::string_view option, std::string_view value);
// With the values in `o`: "--model llama-nano --tokenizer bpe-1024 ...".
std::string default_job_args(const TrainConfig& o);
// A warning about options without effect, or empty.
std::string useless_options(const TrainConfig& config);

// The tokenizer selected by --tokenizer. bpe-N is a bpe tokenizer of at most N tokens, trained with a progress display.
// Throws Error (usage) if `name` is neither a kind of tokenizer nor a folder.
TokenizerChoice tokenizer_choice(const std::optional<std::string>& name, const std::string& otherwise, bool quiet);

ExampleOptions example_options(const TrainConfig& config);

// Opens --data: a dataset, examples, or a mixture of these. Throws as dataset_for(), load_examples() and mixed().
Dataset open_data(const TrainConfig& config, const TokenizerChoice& tokenizer);

// Throws Error (usage) for an option about examples if the data contain none.
void check_example_options(const DataConfig& data);

std::vector<std::string> describe_data(const Dataset& dataset);

}  // namespace tessera
