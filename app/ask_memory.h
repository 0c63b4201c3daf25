// The commands ask for the memory that they will use, before they draw or write anything.
#pragma once
#include <filesystem>

#include "app/options.h"
#include "train/memory_check.h"

namespace tessera {

// Before data are read. Throws Error (usage) as below.
void ask_for_least_memory(const Job& job);
// For `ranks` ranks of this host from rank `first` on; the vocabulary is that of the tokens where the job has none. On
// ranks that compute on GPUs nothing is asked. Throws Error (usage) where memory does not suffice, after a table on
// standard error.
void ask_for_training(const TrainOptions& options, const Job& job, int64_t vocab, HostMemory here);
// The same beside the oracle.
void ask_for_verifying(const Job& job);
// Of a model that only computes.
void ask_for_inference(const Job& job);
// Sizes in a file cost nothing: throws InputError, naming both files, where the model that `config` describes has many
// times the bytes of any `model.safetensors` in `folder` or in a checkpoint there. A vocabulary that is not known is 1.
void check_described(const std::filesystem::path& config, const std::filesystem::path& folder, const Job& job,
                     int64_t vocab = 1);

}  // namespace tessera
