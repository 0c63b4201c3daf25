// Files, slices and rows of recordings.
#include "verify/audit/recording.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cctype>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <numeric>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/bad_input.h"
#include "base/json.h"
#include "tensor/dtype.h"
#include "verify/audit/info.h"
#include "verify/audit/slices.h"

namespace tessera::audit {

namespace fs = std::filesystem;
using Json = nlohmann::json;

namespace {

constexpr int64_t kMaxRanks = 100000;
constexpr size_t kMaxDims = 16;
constexpr double kMaxToken = 0x1p40;
constexpr int64_t kMaxElements = int64_t{1} << 53;
// A full tensor has at most this many elements in addition to the recorded ones times the ranks.
constexpr int64_t kMaxMissing = int64_t{1} << 16;

int64_t count_elements(const std::vector<int64_t>& shape, size_t first, size_t last) {
  return std::accumulate(shape.begin() + static_cast<int64_t>(first), shape.begin() + static_cast<int64_t>(last),
                         int64_t{1}, std::multiplies<>());
}

// The number of elements, counting empty dims as 1.
int64_t extent(const std::vector<int64_t>& shape) {
  int64_t n = 1;
  for (const int64_t size : shape) n *= std::max<int64_t>(1, size);
  return n;
}

int64_t elements(const Slice& slice, const std::vector<int64_t>& shape) {
  int64_t n = 1;
  for (size_t d = 0; d < shape.size(); ++d) n *= count_indices(dim_ranges(slice, shape, d));
  return n;
}

double precision(const TensorBytes& t) {
  if (t.is_half) return 0x1p-10;
  return t.dtype == DType::bfloat16 ? 0x1p-7 : t.dtype == DType::float32 ? 0x1p-23 : 0x1p-52;
}

std::string axis_key(const RankInfo& rank, const std::vector<std::string>& axes, std::vector<int>& out) {
  for (const std::string& axis : axes) {
    const auto found = rank.axes.find(axis);
    if (found == rank.axes.end()) return axis;
    out.push_back(static_cast<int>(found->second.first));
  }
  return "";
}

bool is_parameter_name(std::string_view name) { return name.ends_with(".weight") || name.ends_with(".bias"); }

// Names without an entry: those of dumps.
Key plain_key(const std::string& name) {
  for (const auto& [plain, kind] : {std::pair{"input_ids", Kind::input_ids},
                                    {"targets", Kind::targets},
                                    {"loss", Kind::loss},
                                    {"grad_norm", Kind::norm},
                                    {"lr", Kind::lr}})
    if (name == plain) return {kind, name};
  for (const auto& [suffix, kind] :
       {std::pair{".clipped_grad", Kind::clipped_grad}, {".updated", Kind::updated}, {".grad", Kind::grad}}) {
    if (!name.ends_with(suffix)) continue;
    const std::string base = name.substr(0, name.size() - std::strlen(suffix));
    return {kind == Kind::grad && !is_parameter_name(base) ? Kind::output_grad : kind, base};
  }
  for (const char* suffix : {".exp_avg", ".exp_avg_sq", ".momentum_buffer"})
    if (name.ends_with(suffix)) return {Kind::state, name};
  return {is_parameter_name(name) ? Kind::parameter : Kind::output, name};
}

bool has_batch(Kind kind) {
  return kind == Kind::input_ids || kind == Kind::targets || kind == Kind::output || kind == Kind::output_grad ||
         kind == Kind::loss;
}

std::vector<std::vector<Range>> parse_index(const Json& index, const std::vector<int64_t>& shape,
                                            const std::string& what) {
  std::vector<std::vector<Range>> out;
  if (index.is_null()) return out;
  const auto refuse = [&] {
    bad_input("{}: index: expected ranges [start, stop] in ({}), got {}", what, fmt::join(shape, ", "), shown(index));
  };
  if (!index.is_array() || index.size() != shape.size()) refuse();
  for (size_t d = 0; d < shape.size(); ++d) {
    std::vector<Range>& ranges = out.emplace_back();
    if (!index[d].is_array()) refuse();
    for (const Json& range : index[d]) {
      if (!range.is_array() || range.size() != 2 || !natural(range[0]) || !natural(range[1])) refuse();
      const Range r{*natural(range[0]), *natural(range[1])};
      if (r.begin > r.end || r.end > shape[d]) refuse();
      if (r.size() > 0) ranges.push_back(r);
    }
    std::vector<Range> sorted = ranges;
    std::ranges::sort(sorted, {}, &Range::begin);
    for (size_t i = 1; i < sorted.size(); ++i)
      if (sorted[i].begin < sorted[i - 1].end)
        bad_input("{}: index: expected ranges without common elements, got {} in dim {}", what, shown(index[d]), d);
  }
  return out;
}

void check_shape(const std::vector<int64_t>& shape, const std::string& what) {
  if (shape.size() > kMaxDims) bad_input("{}: shape: expected at most {} sizes, got {}", what, kMaxDims, shape.size());
  int64_t all = 1;
  for (const int64_t size : shape)
    if (__builtin_mul_overflow(all, std::max<int64_t>(1, size), &all) || all > kMaxElements)
      bad_input("{}: shape: expected at most 2^53 elements, got ({})", what, fmt::join(shape, ", "));
}

std::vector<int64_t> parse_shape(const Json& shape, const std::string& what) {
  std::vector<int64_t> out;
  const auto refuse = [&] { bad_input("{}: shape: expected sizes, got {}", what, shown(shape)); };
  if (!shape.is_array()) refuse();
  for (const Json& size : shape) {
    if (!natural(size)) refuse();
    out.push_back(*natural(size));
  }
  check_shape(out, what);
  return out;
}

}  // namespace

int64_t StoredTensor::rows() const { return shape.empty() ? 1 : count_elements(shape, 0, shape.size() - 1); }

int64_t layer_index(std::string_view name) {
  for (size_t at = 0; at < name.size();) {
    const size_t end = std::min(name.find('.', at), name.size());
    if (end > at && std::ranges::all_of(name.substr(at, end - at), [](char c) { return std::isdigit(c) != 0; }))
      return std::strtoll(std::string(name.substr(at, end - at)).c_str(), nullptr, 10);
    at = end + 1;
  }
  return -1;
}

Recording::Recording(const fs::path& path, const std::string& name) : what_(name.empty() ? path.string() : name) {
  std::vector<fs::path> files;
  if (!is_there(path)) bad_input("{}: no such file or directory; expected a recording", what_);
  if (!names_directory(path)) {
    files.push_back(path);
  } else {
    for (const fs::directory_entry& entry : fs::directory_iterator(path))
      if (entry.path().extension() == ".safetensors" && entry.path().filename().string().starts_with("rank_"))
        files.push_back(entry.path());
    std::ranges::sort(files, {}, [](const fs::path& file) { return std::pair(file.string().size(), file); });
  }
  if (files.empty()) bad_input("{}: expected rank_0000.safetensors and those of the other ranks, got none", what_);
  for (size_t r = 0; r < files.size(); ++r) {
    names_.push_back(files[r].filename().string());
    open(std::make_unique<Safetensors>(files[r], true), r, files.size());
  }
  finish();
}

Recording::Recording(std::span<const std::span<const std::byte>> files, const std::string& name) : what_(name) {
  for (size_t r = 0; r < files.size(); ++r) {
    names_.push_back(fmt::format("{}, rank {}", name, r));
    open(std::make_unique<Safetensors>(files[r], names_.back(), true), r, files.size());
  }
  finish();
}

void Recording::finish() {
  check_ranks(ranks_, [&](size_t rank) { return files_[rank]->what(); });
  group_slices();
  read_tokens();
}

void Recording::open(std::unique_ptr<Safetensors> file, size_t rank, size_t ranks) {
  const Safetensors& all = *files_.emplace_back(std::move(file));
  const std::string& what = all.what();
  const auto text = [&](const char* key, const std::string& missing) {
    const auto found = all.metadata().find(key);
    return found == all.metadata().end() ? missing : found->second;
  };
  const auto decimal = [&](const char* key, int64_t missing) {
    const std::string& value = text(key, std::to_string(missing));
    if (value.empty() || value.size() > 18 || value.find_first_not_of("0123456789") != value.npos)
      bad_input("{}: {}: expected a decimal number, got {}", what, key, shown(Json(value)));
    return static_cast<int64_t>(std::strtoll(value.c_str(), nullptr, 10));
  };
  const bool recorded = all.metadata().contains("tessera_recording");
  if (!recorded && !all.contains("input_ids") && !all.contains("loss"))
    bad_input("{}: expected a recording or a dump, got other tensors", what);
  if (const std::string version = text("tessera_recording", "1"); version != "1")
    bad_input("{}: expected version 1 of recordings, got {}", what, shown(Json(version)));
  const int64_t count = decimal("ranks", 1), here = decimal("rank", 0), step = decimal("step", 1);
  if (count != static_cast<int64_t>(ranks) || count > kMaxRanks)
    bad_input("{}: expected {} files, one per rank, got {}", what, count, ranks);
  if (here != static_cast<int64_t>(rank)) bad_input("{}: expected rank {}, got rank {}", what, rank, here);
  if (rank > 0 && step != step_) bad_input("{}: expected step {} as on rank 0, got {}", what, step_, step);
  step_ = step;
  ranks_.push_back(parse_info(text("info", "{}"), what, count));
  const Json tensors = parse_json(text("tensors", "{}"), what + ": tensors", JsonFile::others);
  if (!tensors.is_object()) bad_input("{}: tensors: expected an object, got {}", what, shown(tensors));
  for (const TensorBytes& t : all.tensors()) {
    if (!t.other.empty() || t.dtype == DType::uint8)
      bad_input("{}: tensor '{}' is {}; expected floating-point values or integers", what, t.name, stored_name(t));
    add(rank, t, value_at(tensors, t.name));
  }
  for (const auto& [name, entry] : tensors.items())
    if (!all.contains(name)) bad_input("{}: there is no tensor '{}'", what, name);
}

void Recording::add(size_t rank, const TensorBytes& bytes, const Json& entry) {
  const std::string what = fmt::format("{}: tensor '{}'", files_[rank]->what(), bytes.name);
  Key key = plain_key(bytes.name);
  Slice slice{.rank = static_cast<int>(rank), .bytes = &bytes};
  std::vector<int64_t> shape = bytes.shape;
  check_shape(shape, what);
  Batch batch{0, 0};
  if (!entry.is_null()) {
    if (!entry.is_object()) bad_input("{}: expected an object in `tensors`, got {}", what, shown(entry));
    const auto text = [&](const char* field, const std::string& missing) {
      const Json& value = value_at(entry, field);
      if (!value.is_null() && !value.is_string()) bad_input("{}: {}: expected text, got {}", what, field, shown(value));
      return value.is_null() ? missing : value.get<std::string>();
    };
    const auto kind = std::ranges::find(kKinds, text("kind", ""));
    if (kind == kKinds.end())
      bad_input("{}: kind: expected one of {}, got {}", what, fmt::join(kKinds, ", "), shown(value_at(entry, "kind")));
    key = {static_cast<Kind>(kind - kKinds.begin()), text("name", bytes.name)};
    if (!value_at(entry, "shape").is_null()) shape = parse_shape(entry["shape"], what);
    slice.index = parse_index(value_at(entry, "index"), shape, what);
    if (const Json& number = value_at(entry, "microbatch"); !number.is_null()) {
      if (!natural(number)) bad_input("{}: microbatch: expected a number from 0, got {}", what, shown(number));
      batch.second = *natural(number);
    }
    std::vector<std::string> axes;
    for (const Json& axis : value_at(entry, "partial")) axes.push_back(axis.is_string() ? axis.get<std::string>() : "");
    if (const std::string bad = axis_key(ranks_[rank], axes, slice.partial); slice.partial.size() != axes.size())
      bad_input("{}: partial: expected axes of the rank, got '{}'", what, bad);
    if (const Json& order = value_at(entry, "order"); order.is_number()) {
      const auto pp = ranks_[rank].axes.find("pp");
      orders_.try_emplace(
          key.name,
          order.get<double>() + 1e6 * static_cast<double>(pp == ranks_[rank].axes.end() ? 0 : pp->second.first));
    }
  }
  const bool tokens = key.kind == Kind::input_ids || key.kind == Kind::targets;
  if (tokens && (is_floating(bytes.dtype) || shape.size() != 2))
    bad_input("{}: expected {} as integers of shape (B, T), got {} ({})", what, to_string(key.kind), stored_name(bytes),
              fmt::join(shape, ", "));
  const bool scalar = key.kind == Kind::loss || key.kind == Kind::norm || key.kind == Kind::lr;
  if (scalar && count_elements(shape, 0, shape.size()) != 1)
    bad_input("{}: expected one element, got ({})", what, fmt::join(shape, ", "));
  if (has_batch(key.kind))
    batch.first = ranks_[rank].data;
  else
    batch = {0, 0};
  if (elements(slice, shape) != count_elements(bytes.shape, 0, bytes.shape.size()))
    bad_input("{}: index: expected {} elements of ({}), got ({})", what, elements(slice, shape), fmt::join(shape, ", "),
              fmt::join(bytes.shape, ", "));
  StoredTensor& to = tensors_[key][batch];
  if (to.replicas.empty()) {
    to.shape = shape;
    to.replicas.emplace_back();
  }
  if (to.shape != shape)
    bad_input("{}: shape: expected ({}) as on rank {}, got ({})", what, fmt::join(to.shape, ", "),
              to.replicas[0][0].rank, fmt::join(shape, ", "));
  to.replicas[0].push_back(slice);
  if (is_floating(bytes.dtype) && (key.kind == Kind::output || key.kind == Kind::output_grad))
    epsilon_ = std::max(epsilon_, precision(bytes));
}

// Each slice belongs to the first replica in which it overlaps no slice with the same partial coordinates.
void Recording::group_slices() {
  for (auto& [key, batches] : tensors_)
    for (auto& [batch, tensor] : batches) {
      const std::vector<int64_t>& shape = tensor.shape;
      std::vector<std::vector<Slice>> replicas;
      for (const Slice& slice : tensor.replicas[0]) {
        if (elements(slice, shape) == 0 && !replicas.empty()) continue;
        const auto fits = [&](const std::vector<Slice>& replica) {
          return std::ranges::none_of(replica, [&](const Slice& other) {
            return other.partial == slice.partial && overlap(other, slice, shape);
          });
        };
        const auto found = std::ranges::find_if(replicas, fits);
        (found == replicas.end() ? replicas.emplace_back() : *found).push_back(slice);
      }
      int64_t recorded = 0;
      for (const Slice& slice : tensor.replicas[0]) recorded += elements(slice, shape);
      const TensorBytes& first = *tensor.replicas[0][0].bytes;
      const int64_t most = std::max<int64_t>(8, std::ssize(ranks_)) * recorded + kMaxMissing;
      if (extent(shape) > most)
        bad_input("{}: tensor '{}': shape: expected at most {} elements for {} recorded ones, got ({})",
                  files_[static_cast<size_t>(tensor.replicas[0][0].rank)]->what(), first.name, most, recorded,
                  fmt::join(shape, ", "));
      tensor.replicas = std::move(replicas);
      std::map<std::vector<int>, int64_t> covered;
      for (const Slice& slice : tensor.replicas[0]) covered[slice.partial] += elements(slice, shape);
      const int64_t all = count_elements(shape, 0, shape.size());
      for (const auto& [partial, count] : covered)
        if (count != all)
          findings_.push_back(fmt::format("{} '{}': {} of {} elements are in no slice", to_string(key.kind), key.name,
                                          all - count, all));
    }
  if (epsilon_ > 0) return;
  for (const auto& [key, batches] : tensors_)
    if (key.kind == Kind::grad) epsilon_ = std::max(epsilon_, precision(*batches.begin()->second.replicas[0][0].bytes));
}

void Recording::read_tokens() {
  const auto* const ids = find(Kind::input_ids, "input_ids");
  if (!ids) return;
  const auto* const targets = find(Kind::targets, "targets");
  std::vector<double> values, trained;
  for (const auto& [batch, tensor] : *ids) {
    const auto found = targets ? targets->find(batch) : std::map<Batch, StoredTensor>::const_iterator();
    const bool has_targets = targets && found != targets->end();
    if (has_targets && found->second.shape != tensor.shape)
      bad_input("{}: tensor '{}': shape: expected ({}) as of input_ids, got ({})",
                files_[static_cast<size_t>(found->second.replicas[0][0].rank)]->what(),
                found->second.replicas[0][0].bytes->name, fmt::join(tensor.shape, ", "),
                fmt::join(found->second.shape, ", "));
    for (int64_t row = 0; row < tensor.shape[0]; ++row) {
      read(tensor, 0, {row, row + 1}, values);
      trained.assign(values.size(), -1);
      if (has_targets) read(found->second, 0, {row, row + 1}, trained);
      TokenRow& made = rows_.emplace_back(TokenRow{batch, row, {}, {}});
      made.used = std::ssize(values);
      int64_t used = 0;
      for (size_t i = 0; i < values.size(); ++i) {
        if (std::isnan(values[i])) bad_input("{}: input_ids: token {} of row {} is in no slice", what_, i, row);
        for (const double x : {values[i], trained[i]})
          if (std::abs(x) > kMaxToken) bad_input("{}: input_ids, targets: expected tokens, got {}", what_, x);
        made.ids.push_back(static_cast<int64_t>(values[i]));
        made.targets.push_back(trained[i] < 0 || std::isnan(trained[i]) ? -1 : static_cast<int64_t>(trained[i]));
        if (made.targets.back() >= 0) used = static_cast<int64_t>(i) + 1;
      }
      if (used > 0) made.used = used;
    }
  }
}

int64_t Recording::axis_size(const std::string& axis) const {
  int64_t size = 1;
  for (const auto& [name, place] : ranks_[0].axes)
    if (name == axis || (axis == "dp" && name.starts_with("dp"))) size *= place.second;
  return size;
}

const std::map<Batch, StoredTensor>* Recording::find(Kind kind, const std::string& name) const {
  const auto found = tensors_.find({kind, name});
  return found == tensors_.end() ? nullptr : &found->second;
}

const Json& Recording::info(const std::string& key) const {
  for (const RankInfo& rank : ranks_)
    if (const Json& found = value_at(rank.info, key); !found.is_null()) return found;
  return value_at(ranks_[0].info, key);
}

// Embeddings, layers, final norm, head; in a layer attention between the norms, then the feed-forward layer; submodules
// before their module.
double Recording::order(const std::string& name) const {
  if (const auto found = orders_.find(name); found != orders_.end()) return found->second;
  const auto contains = [&](std::string_view part) { return name.find(part) != std::string::npos; };
  const double dots = static_cast<double>(std::ranges::count(name, '.'));
  const int64_t layer = layer_index(name);
  if (layer < 0) {
    if (contains("lm_head") || contains("output") || contains("loss")) return 1e9;
    if (contains("norm") || contains("ln_f") || contains("final")) return 5e8;
    return contains("emb") || contains("wte") || contains("wpe") || contains("tok") ? -1 : 2e9 - dots;
  }
  const std::string digits = std::to_string(layer);
  const std::string rest = "." + name.substr(std::min(name.size(), name.find("." + digits) + 1 + digits.size()));
  const auto within = [&] {
    const auto has = [&](std::string_view part) { return rest.find(part) != std::string::npos; };
    if (rest == "." || rest == "..") return 9.0;
    if (has(".input_layernorm") || has(".ln_1") || has(".norm1")) return 0.0;
    if (has("attn") || has("attention"))
      return has("q_proj") || has("k_proj") || has("v_proj") || has("c_attn") || has("qkv") ? 1.0
             : has("_proj")                                                                 ? 1.5
                                                                                            : 2.0;
    if (has("layernorm") || has(".ln_2") || has(".norm2")) return 3.0;
    return has("down") || has("c_proj") ? 4.5 : has("_proj") || has("c_fc") || has("fc1") || has("gate") ? 4.0 : 5.0;
  };
  return static_cast<double>(10 * layer) + within();
}

}  // namespace tessera::audit
