// Parts of a checkpoint: what each rank of a plan saves of a run's tensors, and nothing else.
#pragma once
#include <filesystem>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "nn/parameter.h"
#include "train/checkpoint/state.h"
#include "train/job.h"

namespace tessera {

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
// and HeldPart say it. Parts may be missing: a host needs those alone that its ranks read. Files are mapped, so of a
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
  WholeTensors tensors() const;

 private:
  void add(const Safetensors& file, const std::string& what);

  std::string what_;
  std::vector<std::unique_ptr<Safetensors>> files_;
  std::map<std::string, Whole> all_;
};

}  // namespace tessera
