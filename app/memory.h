// Memory checks of the commands, before any allocation or output.
#pragma once
#include <cstdint>
#include <filesystem>

#include "train/memory_refusal.h"

namespace tessera {

// Runs before data are read. Throws Error (usage) as below.
void check_minimum_memory(const TrainConfig& job);
// Memory for `ranks` ranks of this host, beginning with rank `first`; `vocab` is used if the job has no vocabulary
// size; `samples`: a text is generated at the end. GPU ranks are not checked. Prints a table on standard error and
// throws Error (usage) if memory is insufficient.
void check_memory_for_training(const TrainConfig& config, bool samples, int64_t vocab, HostMemory here);
void check_memory_for_verifying(const TrainConfig& job);
void check_memory_for_inference(const TrainConfig& job);
// Guards against absurd sizes: throws InputError, naming both files, if the model described by `config` is many times
// larger than any `model.safetensors` in `folder` or in a checkpoint there. An unknown vocabulary counts as 1.
void check_described(const std::filesystem::path& config, const std::filesystem::path& folder, const TrainConfig& job,
                     int64_t vocab = 1);

}  // namespace tessera
