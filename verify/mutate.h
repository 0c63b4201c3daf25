// Planting of defects. Some are planted where ranks communicate: see verify().
#pragma once
#include "train/sequences.h"
#include "train/trainer.h"
#include "verify/verify.h"

namespace tessera {

// The sequences that a rank of the world loads.
Sequences mutated(Sequences sequences, Mutation mutation, const Job& job, int rank);
// In the model, before the first step; in the gradients, after their sums.
void damage_model(Trainer& trainer, Mutation mutation);
void damage_gradients(Trainer& trainer, Mutation mutation);

}  // namespace tessera
