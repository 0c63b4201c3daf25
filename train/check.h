// Checks of a plan and of a configuration, before anything is allocated: the error names the field and the nearest
// valid value.
#pragma once
#include <cstdint>

#include "train/config.h"

namespace tessera {

// Throws FieldError if the plan is invalid for every model.
void check(const Plan& plan);

// Throws FieldError if `schedule` is neither a name nor the path of a file.
void check_schedule_name(const Plan& plan);
// The number of ranks that the launcher or the field `ranks` specifies: 0 if neither does, 1 if processes have no
// launcher.
int64_t requested_ranks(const TrainConfig& job);
// Throws FieldError for invalid model sizes, or if `microbatches` does not divide the batch.
void check_sizes(const TrainConfig& job);
// Throws FieldError if this process cannot start or join `ranks` ranks of the plan's backend.
void check_backend(const Plan& plan, int64_t ranks);
// Throws FieldError if the plan does not divide the batch, the heads or the tokens.
void check_layout(const Plan& plan, const ModelConfig& model, int64_t batch);
// Checks what a Trainer needs, for training or inference, including this machine's devices. Memory is checked by
// memory_refusal() (train/memory_refusal.h). `traced`: the step's actions are traced.
void check_trainer(const TrainConfig& job, bool traced = false);
// Runs every check of a training run: check_trainer(), and those of trained weights, learning rate, validation and
// resuming.
void check(const TrainConfig& job, bool traced = false);

}  // namespace tessera
