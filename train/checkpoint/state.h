// A run's state as one rank would hold it: one tensor per parameter, whatever the layout. Checkpoints hold this, so a
// run that was saved under one layout goes on under any other.
#pragma once
#include <cstddef>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "data/safetensors.h"
#include "train/trainer.h"

namespace tessera {

// One tensor of the whole state: "blocks.0.mlp.up.weight", or the optimizer's "blocks.0.mlp.up.weight.m".
struct WholeTensor {
  std::string name;
  DType dtype{};
  Shape shape;
};
// The kinds of tensors that the optimizer keeps, or keeps of matrices that it updates as wholes: "m", "v".
std::vector<std::string> state_kinds(const Optimisation& optim, bool matrices = false);
// The suffix in the names of state of ranks that train alone: nothing for the first copy, ".replica1" for the second.
std::string suffix_of_copy(int copy);
// All parameters, and all that optimizers and strategies keep, in the order of a file. Of ranks that train alone the
// parameters are model_of(), and each rank's own are among what is kept: "....weight.m.replica1", "....value.replica1".
std::vector<WholeTensor> list_values(Trainer& trainer);
std::vector<WholeTensor> list_state(Trainer& trainer);

// A rank's part of one tensor: elements [begin, begin + part.numel()) of its part of the parameter. for_each_run() says
// where these are in the whole.
struct HeldPart {
  std::string name;
  const Parameter* parameter = nullptr;
  Tensor part;  // 1-D, where the rank has it
  int64_t begin = 0;
};
// The model of the run as this rank has it: its shards; of ranks that train alone what they had in common last, in the
// dtype of values.
std::vector<FlatUnit> model_of(const DataStrategy& strategy);
// Each element of the whole state is among these on exactly one rank, the one that saves it; what all parts of a matrix
// in four bits share is with each of them.
std::vector<HeldPart> own_values(Trainer& trainer);
std::vector<HeldPart> own_state(Trainer& trainer);
// All that this rank holds between steps and that other ranks hold too, if any does.
std::vector<HeldPart> held_between_steps(Trainer& trainer);

// Full names of parameters with their values; of gradients; and of the optimizer's tensors. On rank 0; elsewhere empty,
// but every rank calls these.
// Where the data axis holds several copies (DataStrategy::copies()), `copy` says which is taken.
std::vector<NamedTensor> whole_values(Trainer& trainer, int copy = 0);
std::vector<NamedTensor> whole_gradients(Trainer& trainer, int copy = 0);
std::vector<NamedTensor> whole_state(Trainer& trainer, int copy = 0);
// The rank of the world, int32, that each element of whole_gradients(), or of whole_values(), comes from.
std::vector<NamedTensor> whole_owners(Trainer& trainer, bool of_gradients);

// Copies elements of a whole tensor, from the one at `begin` on, as many as `to` has room for.
using TensorReader = std::function<void(int64_t begin, std::span<std::byte> to)>;
// Whole tensors by name, to be read in that dtype and shape: nothing is read of what nobody asks for.
using WholeTensors = std::function<TensorReader(const std::string& name, DType dtype, const Shape& shape)>;
// A reader of `bytes`, which must outlive it.
TensorReader reader_of(std::span<const std::byte> bytes, DType dtype);
// Units, or shards of them, take their part. Throws what `source` throws.
void read_values(const std::vector<FlatUnit>& units, const WholeTensors& source);
void read_state(const Optimizer& optimizer, const WholeTensors& source);
// And what the strategy of the data axis keeps; of ranks that train alone also their values.
void read_state(Trainer& trainer, const WholeTensors& source);
// The first weights of a run: parameters, and their master copies, which are rounded less. What `source` gives no
// reader for keeps the values that it has.
void begin_with(const std::vector<FlatUnit>& units, const Optimizer& optimizer, const WholeTensors& source);

}  // namespace tessera
