// A run's state as one rank would hold it: one tensor per parameter, whatever the layout. Checkpoints hold this, so a
// run that was saved under one layout goes on under any other. First what ranks hold of it, then the files that they
// save, then what is checked before.
#pragma once

#include "data/safetensors.h"
#include "train/trainer.h"

namespace tessera {

// One tensor of the whole state: "blocks.0.mlp.up.weight", or the optimizer's "blocks.0.mlp.up.weight.m".
struct FullTensor {
  std::string name;
  DType dtype{};
  Shape shape;
};
// The kinds of tensors that the optimizer keeps, or keeps of matrices that it updates as wholes: "m", "v".
std::vector<std::string> state_kinds(const Optimisation& optim, bool matrices = false);
// The suffix in the names of state of ranks that train alone: nothing for the first copy, ".replica1" for the second.
std::string suffix_of_copy(int copy);
// All parameters, and all that optimizers and strategies keep, in the order of a file. Of ranks that train alone the
// parameters are model_units(), and each rank's own are among what is kept: "....weight.m.replica1",
// "....value.replica1".
std::vector<FullTensor> list_values(Trainer& trainer);
std::vector<FullTensor> list_state(Trainer& trainer);

// A rank's part of one tensor: elements [begin, begin + part.numel()) of its part of the parameter. for_each_run() says
// where these are in the whole.
struct TensorSlice {
  std::string name;
  const Parameter* parameter = nullptr;
  Tensor part;  // 1-D, where the rank has it
  int64_t begin = 0;
};
// The model of the run as this rank has it: its shards; of ranks that train alone what they had in common last, in the
// dtype of values.
std::vector<FlatUnit> model_units(const DataStrategy& strategy);
// Each element of the whole state is among these on exactly one rank, the one that saves it; what all parts of a matrix
// in four bits share is with each of them.
std::vector<TensorSlice> own_values(Trainer& trainer);
std::vector<TensorSlice> own_state(Trainer& trainer);
// All that this rank holds between steps and that other ranks hold too, if any does.
std::vector<TensorSlice> held_between_steps(Trainer& trainer);

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
using FullTensors = std::function<TensorReader(const std::string& name, DType dtype, const Shape& shape)>;
// A reader of `bytes`, which must outlive it.
TensorReader make_reader(std::span<const std::byte> bytes, DType dtype);
// Units, or shards of them, take their part. Throws what `source` throws.
void read_values(const std::vector<FlatUnit>& units, const FullTensors& source);
void read_state(const Optimizer& optimizer, const FullTensors& source);
// And what the strategy of the data axis keeps; of ranks that train alone also their values.
void read_state(Trainer& trainer, const FullTensors& source);
// The first weights of a run: parameters, and their master copies, which are rounded less. What `source` gives no
// reader for keeps the values that it has.
void begin_with(const std::vector<FlatUnit>& units, const Optimizer& optimizer, const FullTensors& source);

// --- files ---

// The part of a tensor in one rank's file: `count` elements from the one at `begin` on, of what its layout keeps.
struct SavedPart {
  std::string name;  // the tensor's name: "blocks.0.mlp.up.weight.m"
  Shape whole = {};
  ShardSpec shard = {};  // without the axis
  int64_t begin = 0, count = 0;
};
// Parts that a run under this plan saves on each rank, and nothing else; one entry for each rank of the plan. `state`:
// those of the optimizer, else of the parameters. From sizes alone, without memory. Throws FieldError for ps-async.
std::vector<std::vector<SavedPart>> parts_of_ranks(const Job& job, bool state);

// The tensors of a checkpoint, whole, whether they lie in one file or in parts:
//
//   model.safetensors                       all of them
//   model.rank-0-of-4.safetensors           of each tensor that rank 0 had a part of: its elements, one after another
//   model.rank-1-of-4.safetensors           ...
//
// Which elements a part has is said in its metadata, "parts": {NAME: {"shape", "dim", "runs", "begin"}}, as Parameter
// and TensorSlice say it. Parts may be missing: a host needs those alone that its ranks read. Files are mapped, so of a
// tensor only what is asked for is read.

std::string part_name(const std::string& stem, size_t rank, size_t ranks);
// The metadata "parts" of a file.
std::string describe_parts(const std::vector<SavedPart>& parts);
// Parses a file's text; `what` names it. Throws InputError for what no layout can be: runs that leave the tensor, or
// meet.
std::vector<SavedPart> parse_parts(std::string_view json, const std::string& what);

class SavedTensors {
 public:
  // `stem` is "model" or "optimizer". Throws InputError naming file and tensor.
  SavedTensors(const std::filesystem::path& checkpoint, const std::string& stem);
  static bool are_in(const std::filesystem::path& checkpoint, const std::string& stem);

  struct Whole {
    DType dtype{};
    std::vector<int64_t> shape;
    struct Piece {
      const TensorBytes* bytes;
      SavedPart part;
    };
    std::vector<Piece> pieces;
  };
  const std::map<std::string, Whole>& all() const { return all_; }
  const Whole& at(const std::string& name) const;  // throws InputError when there is none of that name
  const std::vector<std::unique_ptr<Safetensors>>& files() const { return files_; }
  // Throws InputError naming a tensor that is not among `names`.
  void expect_no_others(const std::set<std::string>& names) const;
  // Elements as they are stored; the reader throws InputError for elements that no part here has. This must outlive it.
  TensorReader reader(const std::string& name) const;
  // By dtype and shape, which must be as stored.
  FullTensors tensors() const;

 private:
  void add(const Safetensors& file, const std::string& what);

  std::string what_;
  std::vector<std::unique_ptr<Safetensors>> files_;
  std::map<std::string, Whole> all_;
};

// --- checks of what ranks hold: for infinities and NaNs, and for copies that have drifted apart ---

// Throws Error (not_finite) naming the tensor and the step when it has an infinity or a NaN. Cost: reads all of it.
void check_finite(const std::string& name, const Tensor& x, int64_t step);
// The place of the first element that is an infinity or a NaN, -1 where there is none.
int64_t first_not_finite(DType dtype, std::span<const std::byte> elements);

// Every rank calls it. Where several ranks hold the same elements of parameters or of optimizer state, over whichever
// axes of the mesh, these must be equal to the last bit. Throws Error (communication) naming the tensor, the step, the
// ranks, and those in the minority where there is one. Cost: reads and hashes all that a rank holds; one all_gather of
// 16 bytes per tensor.
void check_replicas(Trainer& trainer);

}  // namespace tessera
