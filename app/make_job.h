// Converts options to a job, rejects invalid combinations, and opens the data.
#pragma once
#include "app/options.h"
#include "data/examples.h"

namespace tessera {

// Fills in preset sizes and mesh axes. If the number of ranks is given (--ranks or an MPI job), --dp follows from it,
// or, if --dp is also given, the only other unset axis. Other axes are 1. Without rank options, the job uses two
// data-parallel ranks if machine and batch allow it. check_plan() rejects a mesh of a different size. Throws Error
// (usage) for an unknown schedule.
Job make_job(const TrainOptions& options);
// All processes must run the same command with the same options, except output options.
LaunchOptions launch_options(const std::string& command, const TrainOptions& options, const Plan& plan);
// Throws Error (usage) naming options and the nearest valid values.
void check_plan(const TrainOptions& options);
// Throws Error (usage) for invalid combinations of options; single values are checked when they are set.
void validate(const TrainOptions& options);

// The default job of `train`: the model, tokenizer and learning rate with the lowest loss after about a minute on two
// cores. Options such as plan options or --steps modify it.
TrainOptions default_job();
// Whether model, data and tokenizer are those of the default job; plan and learning rate may differ.
bool is_default_job(const TrainOptions& o);
// Whether this value of a `train` option selects model, data, tokenizer or initial weights, which disables the default
// job.
bool chooses_job(std::string_view option, std::string_view value);
// With the values in `o`: "--model llama-nano --tokenizer bpe-1024 ...".
std::string default_job_args(const TrainOptions& o);
// Whether intermediate checkpoints are written in the background from a copy.
bool saves_in_background(const TrainOptions& options);
// A warning about options without effect, or empty.
std::string useless_options(const TrainOptions& o);

// The tokenizer selected by --tokenizer. bpe-N is a bpe tokenizer of at most N tokens, trained with a progress display.
// Throws Error (usage) if `name` is neither a kind of tokenizer nor a folder.
TokenizerChoice tokenizer_choice(const std::optional<std::string>& name, const std::string& otherwise, bool quiet);

ExampleOptions example_options(const TrainOptions& options);

// A dataset, examples, or a mixture of both. Throws as dataset_for(), load_examples() and mixed() do.
Dataset open_data(const TrainOptions& options, const TokenizerChoice& tokenizer);

// Throws Error (usage) if options about examples are set without examples.
void check_example_options(const TrainOptions& options);

std::vector<std::string> describe_data(const Dataset& dataset);

}  // namespace tessera
