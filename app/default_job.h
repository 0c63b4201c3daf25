// What `tessera train` trains where nothing says what: a model and settings that make the most of a minute on two
// cores.
#pragma once
#include <string>
#include <string_view>

#include "app/options.h"

namespace tessera {

// The defaults of `train` with the default job in them. Other options, as those of the plan or --steps, change it.
TrainOptions default_job();

// Whether that is what `o` trains, under whatever plan and at whatever rate.
bool is_default_job(const TrainOptions& o);

// Whether an option of `train` says what is trained: a model, its sizes, a text, a tokenizer, weights to begin with.
// Where one is given, on the command line or in a file, there is no default job.
bool chooses_job(std::string_view option);

// The options that the default job stands for, with the values that `o` gives them, to be typed:
// "--model llama-nano --tokenizer bpe-1024 ...".
std::string default_job_words(const TrainOptions& o);

// What a user should hear of options that go together and do nothing; empty where there are none.
std::string useless_options(const TrainOptions& o);

}  // namespace tessera
