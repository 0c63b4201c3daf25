// The default job of `train`.
#pragma once
#include <string>
#include <string_view>

#include "app/options.h"

namespace tessera {

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

}  // namespace tessera
