// A run's state as one rank would hold it: one tensor per parameter, whatever the layout. Checkpoints hold this, so a
// run that was saved under one layout goes on under any other.
#pragma once
#include <cstddef>
#include <functional>
#include <string>
#include <vector>

#include "data/safetensors.h"
#include "train/trainer.h"

namespace tessera {

// Full names of parameters with their values; of gradients; and of the optimizer's tensors,
// "blocks.0.mlp.up.weight.m". On rank 0; elsewhere empty, but every rank calls these.
std::vector<NamedTensor> whole_values(Trainer& trainer);
std::vector<NamedTensor> whole_gradients(Trainer& trainer);
std::vector<NamedTensor> whole_state(Trainer& trainer);

// The kinds of tensors that the optimizer keeps ("m", "v"), known on ranks too that keep none. Every rank calls it.
std::vector<std::string> state_kinds(Trainer& trainer);

// Where the elements of a whole tensor are, which must be of that dtype and shape.
using WholeTensors = std::function<const std::byte*(const std::string& name, DType dtype, const Shape& shape)>;
// Those of a file, which must outlive the result. Throws InputError for one that is missing or of another kind.
WholeTensors tensors_of(const Safetensors& file);
// Units, or shards of them, take their part. Throws what `source` throws.
void read_values(const std::vector<FlatUnit>& units, const WholeTensors& source);
void read_state(const Optimizer& optimizer, const WholeTensors& source);

}  // namespace tessera
