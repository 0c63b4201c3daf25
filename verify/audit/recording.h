// Recordings of one training step by any program: one safetensors file per rank (docs/audit.md), or a dump of Tessera
// (train/dump.h), which is a recording of one rank.
//
// A tensor is stored as slices, lists of index ranges per dim of the full tensor, possibly as partial sums over mesh
// axes. Slices are grouped into replicas, each of which covers the full tensor once:
//
//   tp 0: rows 0-3 ---+                                        tp 0: all ---> replica 0
//                     +--> replica 0 (one)        and          tp 1: all ---> replica 1
//   tp 1: rows 4-7 ---+
//
// Nothing is assembled in memory: readers return some rows of a tensor, in float64.
#pragma once
#include <array>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "data/safetensors.h"
#include "parallel/comm/call.h"

namespace tessera::audit {

// In causal order.
enum class Kind : uint8_t {
  input_ids,
  targets,
  parameter,
  state,
  output,
  loss,
  output_grad,
  grad,
  norm,
  clipped_grad,
  lr,
  updated
};
inline constexpr std::array<std::string_view, 12> kKinds{"input_ids", "targets",      "parameter",   "state",
                                                         "output",    "loss",         "output_grad", "grad",
                                                         "norm",      "clipped_grad", "lr",          "updated"};
constexpr std::string_view to_string(Kind kind) { return kKinds.at(static_cast<size_t>(kind)); }

struct Slice {
  int rank = 0;
  const TensorBytes* bytes = nullptr;
  std::vector<std::vector<Range>> index = {};  // per dim; empty: complete
  std::vector<int> partial = {};               // coordinates on the axes over which values are summed
};

struct StoredTensor {
  std::vector<int64_t> shape;                // of the full tensor
  std::vector<std::vector<Slice>> replicas;  // at least one
  int64_t rows() const;                      // product of all dims but the last
  int64_t width() const { return shape.empty() ? 1 : shape.back(); }
};

// The data rank and the micro-batch of an activation; {0, 0} for parameters.
using Batch = std::pair<int64_t, int64_t>;
struct Key {
  Kind kind{};
  std::string name;
  auto operator<=>(const Key&) const = default;
};

struct RankInfo {
  std::map<std::string, std::pair<int64_t, int64_t>> axes;  // coordinate and size
  nlohmann::json info;
  int64_t data = 0;  // index on the data axes
};

// One sequence of the global batch.
struct TokenRow {
  Batch batch;
  int64_t row = 0;                    // in its micro-batch
  std::vector<int64_t> ids, targets;  // targets: -1 if not trained
  int64_t used = 0;                   // tokens up to the last trained one
};

class Recording {
 public:
  // Throws InputError for malformed files and slices, missing ranks, and ranks of different steps.
  // `name` replaces the path in messages.
  explicit Recording(const std::filesystem::path& path, const std::string& name = "");
  // The bytes of the ranks' files, which must outlive the object.
  Recording(std::span<const std::span<const std::byte>> files, const std::string& name);

  const std::string& what() const { return what_; }
  const std::vector<RankInfo>& ranks() const { return ranks_; }
  int64_t axis_size(const std::string& axis) const;
  int64_t step() const { return step_; }
  const std::map<Key, std::map<Batch, StoredTensor>>& tensors() const { return tensors_; }
  // Null if there is none.
  const std::map<Batch, StoredTensor>* find(Kind kind, const std::string& name) const;
  const std::vector<TokenRow>& rows() const { return rows_; }
  // Position of a module in the forward pass; lower first.
  double order(const std::string& name) const;
  // The coarsest dtype of activations, or of gradients if there are none.
  double epsilon() const { return epsilon_; }
  const std::vector<std::string>& findings() const { return findings_; }  // gaps and overlaps
  // A member of `info` of the first rank that has it; null if none has.
  const nlohmann::json& info(const std::string& key) const;
  const std::vector<std::string>& files() const { return names_; }

  // Elements [row, row + count) x all columns of a replica; NaN where no rank has the element. Throws InputError for
  // other values that are not finite. Pages of the files are released after at most 16 MiB: a mapped file is resident
  // otherwise.
  void read(const StoredTensor& tensor, size_t replica, Range rows, std::vector<double>& out) const;
  // Whether a slice of the first replica has an element.
  bool has(const StoredTensor& tensor, int64_t row, int64_t column) const { return owner(tensor, 0, row, column) >= 0; }
  // The rank that provides an element; -1 if none does.
  int owner(const StoredTensor& tensor, size_t replica, int64_t row, int64_t column) const;
  // Axes on which two replicas have different coordinates.
  std::vector<std::string> differing_axes(const StoredTensor& tensor, size_t a, size_t b) const;

 private:
  void open(std::unique_ptr<Safetensors> file, size_t rank, size_t ranks);
  void add(size_t rank, const TensorBytes& bytes, const nlohmann::json& entry);
  void finish();
  void group_slices();
  void read_tokens();

  std::string what_;
  std::vector<std::string> names_;
  std::vector<std::unique_ptr<Safetensors>> files_;
  std::vector<RankInfo> ranks_;
  int64_t step_ = 0;
  std::map<Key, std::map<Batch, StoredTensor>> tensors_;
  std::map<std::string, double> orders_;
  std::vector<TokenRow> rows_;
  std::vector<std::string> findings_;
  double epsilon_ = 0;
  mutable int64_t resident_ = 0;  // bytes of mapped pages since the last release, at most
};

// Layer index in a module's name, the first numeric component; -1 if there is none.
int64_t layer_index(std::string_view name);

}  // namespace tessera::audit
