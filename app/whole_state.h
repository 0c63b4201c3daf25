// A run's state as one rank would hold it: one tensor per parameter, whatever the layout. Checkpoints hold this, so a
// run that was saved under one layout goes on under any other.
#pragma once
#include <string>
#include <vector>

#include "app/trainer.h"
#include "data/safetensors.h"

namespace tessera {

// Full names of parameters with their values; of gradients; and of the optimizer's tensors,
// "blocks.0.mlp.up.weight.m". On rank 0; elsewhere empty, but every rank calls these.
std::vector<NamedTensor> whole_values(Trainer& trainer);
std::vector<NamedTensor> whole_gradients(Trainer& trainer);
std::vector<NamedTensor> whole_state(Trainer& trainer, const std::string& optimizer);

// Each rank reads its part. Throws InputError.
void read_values(Trainer& trainer, const Safetensors& file);
void read_state(Trainer& trainer, const Safetensors& file);

}  // namespace tessera
