// From options to a job: what the libraries are told, what cannot be, and what is trained where nothing says what.
#pragma once
#include "app/options.h"
#include "data/examples.h"

namespace tessera {

// Presets are filled in, and of the axes what is not given follows from the number of ranks (--ranks, or an MPI job's):
// --dp does, or, when that is given, the only other axis that is not. Otherwise it is 1; with no word about ranks at
// all, two data-parallel ranks where the machine and the batch allow it. May be a mesh of another number of ranks,
// which check_plan() refuses. Throws Error (usage) for a schedule that has no such name.
Job make_job(const TrainOptions& options);
// How the ranks of a command are started. Processes must have been given the same command, the same options (but
// for what is said to the user) and the same program.
LaunchOptions launch_options(const std::string& command, const TrainOptions& options, const Plan& plan);
// Throws Error (usage) in the words of the options, with the nearest values that can be.
void check_plan(const TrainOptions& options);
// Throws Error (usage) for values that do not go together, naming the options. Single values were checked when set.
void validate(const TrainOptions& options);

// The defaults of `train` with the default job in them, which makes the most of a minute on two cores. Other options,
// as those of the plan or --steps, change it.
TrainOptions default_job();
// Whether that is what `o` trains, under whatever plan and at whatever rate.
bool is_default_job(const TrainOptions& o);
// Whether an option of `train` with that value says what is trained: a model, its sizes, a text, a tokenizer, weights
// to begin with. If one is given, on the command line or in a file, there is no default job.
bool chooses_job(std::string_view option, std::string_view value);
// The options that the default job stands for, with the values that `o` gives them, to be typed:
// "--model llama-nano --tokenizer bpe-1024 ...".
std::string default_job_words(const TrainOptions& o);
// True when there are checkpoints before the last one that are written from a copy.
bool saves_in_background(const TrainOptions& options);
// A warning about options that go together and do nothing, for the user; empty where there are none.
std::string useless_options(const TrainOptions& o);

// The data of a run: its tokenizer, options of examples for fine-tuning, and the lines that describe it.

// The tokenizer that --tokenizer names, with progress shown while one is trained. bpe-N is a bpe tokenizer of at most N
// tokens. Throws Error (usage) where it is neither a kind of tokenizer nor a folder.
TokenizerChoice tokenizer_choice(const std::optional<std::string>& name, const std::string& otherwise, bool quiet);

ExampleOptions example_options(const TrainOptions& options);

// Opens the data that `data` names: a dataset, examples, or a mixture of either. Throws as dataset_for(),
// load_examples() and mixed() do.
Dataset open_data(const TrainOptions& options, const TokenizerChoice& tokenizer);

// Throws Error (usage) for an option about examples beside data that has none.
void check_example_options(const TrainOptions& options);

// Lines about it; of a mixture, one for each part.
std::vector<std::string> describe_data(const Dataset& dataset);

}  // namespace tessera
