// Full training state: one tensor per parameter, independent of the layout. Checkpoints store it, so a run saved under
// one layout resumes under any other.
#pragma once
#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "data/safetensors.h"
#include "train/state.h"

namespace tessera {

// One full tensor: "blocks.0.mlp.up.weight", or the optimizer's "blocks.0.mlp.up.weight.m".
struct FullTensor {
  std::string name;
  DType dtype{};
  Shape shape;
};
// Suffixes of a parameter's optimizer state: "m", "v"; `matrices`: for parameters that are updated as full matrices.
std::vector<std::string> state_kinds(const Optimisation& optim, bool matrices = false);
// Suffix of a local-update replica's state: empty for the first, ".replica1" for the second.
std::string suffix_of_copy(int copy);
// All parameters, and all optimizer and strategy state, in file order. With local updates the parameters are
// model_units(), and each replica's values are part of the state: "....weight.m.replica1", "....value.replica1".
std::vector<FullTensor> list_values(TrainState& train);
std::vector<FullTensor> list_state(TrainState& train);

// A rank's slice of a tensor: elements [begin, begin + part.numel()) of its shard of the parameter; for_each_run() maps
// them to the full tensor.
struct TensorSlice {
  std::string name;
  const Parameter* parameter = nullptr;
  Tensor part;  // 1-D; defined on ranks that store it
  int64_t begin = 0;
};
// The model shards of this rank; with local updates, the values of the last synchronization in the parameters' dtype.
std::vector<FlatUnit> model_units(const DataStrategy& strategy);
// Every element of the full state is in the slices of exactly one rank, which saves it; values shared by all shards of
// a 4-bit matrix are in every slice.
std::vector<TensorSlice> own_values(TrainState& train);
std::vector<TensorSlice> own_state(TrainState& train);
std::vector<TensorSlice> own_gradients(TrainState& train);  // after the last reduction
// This rank's slices, including replicas.
std::vector<TensorSlice> held_between_steps(TrainState& train);

// Full tensors by parameter name. Collective; empty except on rank 0. `copy` selects the replica if the data axis has
// several (DataStrategy::copies()).
std::vector<NamedTensor> full_values(TrainState& train, int copy = 0);
std::vector<NamedTensor> full_gradients(TrainState& train, int copy = 0);
std::vector<NamedTensor> full_state(TrainState& train, int copy = 0);
// int32: the world rank that provides each element of full_gradients() or full_values().
std::vector<NamedTensor> full_matrix_state(TrainState& train, bool of_gradients);

// Fills `to` with the elements of a full tensor from index `begin` on.
using TensorReader = std::function<void(int64_t begin, std::span<std::byte> to)>;
// Readers of full tensors by name; tensors are read only on request.
using FullTensors = std::function<TensorReader(const std::string& name, DType dtype, const Shape& shape)>;
// `bytes` must outlive the reader.
TensorReader make_reader(std::span<const std::byte> bytes, DType dtype);
// Propagate errors of `source`.
void read_values(const std::vector<FlatUnit>& units, const FullTensors& source);
void read_state(const Optimizer& optimizer, const FullTensors& source);
// Also reads the state of the data-axis strategy, and with local updates each replica's values.
void read_state(TrainState& train, const FullTensors& source);
// Loads initial weights into parameters and their master copies, which retain more bits. Tensors without a reader
// retain their values.
void begin_with(const std::vector<FlatUnit>& units, const Optimizer& optimizer, const FullTensors& source);

// One rank's slice of a tensor, as stored in its file: `count` elements of the layout's shard from index `begin` on.
struct SavedSlice {
  std::string name;  // "blocks.0.mlp.up.weight.m"
  Shape full_shape = {};
  ShardSpec shard = {};  // without the axis
  int64_t begin = 0, count = 0;
};
// The slices that each rank saves, computed from sizes alone. `state`: optimizer state, otherwise parameters. Throws
// FieldError for ps-async.
std::vector<std::vector<SavedSlice>> slices_of_ranks(const TrainConfig& job, bool state);

// Full tensors of a checkpoint, stored in one file or in slices:
//
//   model.safetensors                       all tensors
//   model.rank-0-of-4.safetensors           rank 0's slices, each 1-D
//
// The metadata "parts": {NAME: {"shape", "dim", "runs", "begin"}} maps slices to full tensors, as Parameter and
// TensorSlice do. Files may be missing: a host needs only those that its ranks read. Files are mapped; only requested
// elements are read.

std::string part_name(const std::string& stem, size_t rank, size_t ranks);
std::string describe_parts(const std::vector<SavedSlice>& parts);
// `what` names the file. Throws InputError for impossible layouts: runs that overlap or exceed the tensor.
std::vector<SavedSlice> parse_parts(std::string_view json, const std::string& what);

class SavedTensors {
 public:
  // `stem` is "model" or "optimizer". Throws InputError with file and tensor.
  SavedTensors(const std::filesystem::path& checkpoint, const std::string& stem);
  static bool are_in(const std::filesystem::path& checkpoint, const std::string& stem);

  struct Stored {
    DType dtype{};
    std::vector<int64_t> shape;
    struct StoredSlice {
      const TensorBytes* bytes;
      SavedSlice part;
    };
    std::vector<StoredSlice> slices;
  };
  const std::map<std::string, Stored>& all() const { return all_; }
  const Stored& at(const std::string& name) const;  // throws InputError if missing
  const std::vector<std::unique_ptr<Safetensors>>& files() const { return files_; }
  // Throws InputError for any tensor not in `names`.
  void expect_no_others(const std::set<std::string>& names) const;
  // The reader throws InputError for elements that are in no file. This object must outlive it.
  TensorReader reader(const std::string& name) const;
  // Readers for the stored dtype and shape.
  FullTensors tensors() const;

 private:
  void add(const Safetensors& file, const std::string& what);

  std::string what_;
  std::vector<std::unique_ptr<Safetensors>> files_;
  std::map<std::string, Stored> all_;
};

// Throws Error (not_finite) with tensor and step if `x` has an infinity or a NaN. Reads all of `x`.
void check_finite(const std::string& name, const Tensor& x, int64_t step);
// -1 if all are finite.
int64_t first_not_finite(DType dtype, std::span<const std::byte> elements);

// Collective. Parameters and optimizer state that are replicated, over any mesh axes, must be bitwise identical. Throws
// Error (communication) with the tensor, the step, the ranks, and the minority if there is one. Cost: reads and hashes
// all state of a rank, and one all_gather of 16 bytes per tensor.
void check_replicas(TrainState& train);

}  // namespace tessera
