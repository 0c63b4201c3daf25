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
#include <limits>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <numeric>
#include <set>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

#include "base/bad_input.h"
#include "base/json.h"
#include "tensor/dtype.h"

namespace tessera::audit {

namespace fs = std::filesystem;
using Json = nlohmann::json;

namespace {

constexpr double kUnset = std::numeric_limits<double>::quiet_NaN();
constexpr int64_t kMaxRanks = 100000;

int64_t count_elements(const std::vector<int64_t>& shape, size_t first, size_t last) {
  return std::accumulate(shape.begin() + static_cast<int64_t>(first), shape.begin() + static_cast<int64_t>(last),
                         int64_t{1}, std::multiplies<>());
}

int64_t count_indices(const std::vector<Range>& ranges) {
  int64_t n = 0;
  for (const Range& r : ranges) n += r.size();
  return n;
}

std::vector<Range> dim_ranges(const Slice& slice, const std::vector<int64_t>& shape, size_t dim) {
  return slice.index.empty() ? std::vector<Range>{{0, shape[dim]}} : slice.index[dim];
}

int64_t elements(const Slice& slice, const std::vector<int64_t>& shape) {
  int64_t n = 1;
  for (size_t d = 0; d < shape.size(); ++d) n *= count_indices(dim_ranges(slice, shape, d));
  return n;
}

bool overlap(const Slice& a, const Slice& b, const std::vector<int64_t>& shape) {
  for (size_t d = 0; d < shape.size(); ++d) {
    bool common = false;
    for (const Range& x : dim_ranges(a, shape, d))
      for (const Range& y : dim_ranges(b, shape, d)) common = common || (x.begin < y.end && y.begin < x.end);
    if (!common) return false;
  }
  return true;
}

double precision(const TensorBytes& t) {
  if (t.is_half) return 0x1p-10;
  return t.dtype == DType::bfloat16 ? 0x1p-7 : t.dtype == DType::float32 ? 0x1p-23 : 0x1p-52;
}

template <class F>
void with_element(const TensorBytes& t, const F& f) {
  if (t.is_half) return f(Half());
  if (t.dtype == DType::float64) return f(double());
  if (t.dtype == DType::float32) return f(float());
  if (t.dtype == DType::bfloat16) return f(bfloat16());
  if (t.dtype == DType::int32) return f(int32_t());
  return f(int64_t());
}

// Elements [begin, begin + count) of stored bytes.
void decode(const TensorBytes& t, int64_t begin, int64_t count, double* out) {
  with_element(t, [&]<class T>(T) {
    for (int64_t i = 0; i < count; ++i) {
      T x;
      std::memcpy(&x, t.bytes.data() + (begin + i) * static_cast<int64_t>(sizeof(T)), sizeof(T));
      if constexpr (std::is_same_v<T, Half>)
        out[i] = wide(x);
      else if constexpr (std::is_same_v<T, bfloat16>)
        out[i] = static_cast<float>(x);
      else
        out[i] = static_cast<double>(x);
    }
  });
}

std::string axis_key(const RankInfo& rank, const std::vector<std::string>& axes, std::vector<int>& out) {
  for (const std::string& axis : axes) {
    const auto found = rank.axes.find(axis);
    if (found == rank.axes.end()) return axis;
    out.push_back(static_cast<int>(found->second.first));
  }
  return "";
}

// Position of an index among the indices of a slice; -1 if it has none.
int64_t local_index(const std::vector<Range>& ranges, int64_t i) {
  int64_t before = 0;
  for (const Range& r : ranges) {
    if (i >= r.begin && i < r.end) return before + i - r.begin;
    before += r.size();
  }
  return -1;
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
      ranges.push_back(r);
    }
  }
  return out;
}

std::vector<int64_t> parse_shape(const Json& shape, const std::string& what) {
  std::vector<int64_t> out;
  if (!shape.is_array()) bad_input("{}: shape: expected sizes, got {}", what, shown(shape));
  for (const Json& size : shape) {
    if (!natural(size)) bad_input("{}: shape: expected sizes, got {}", what, shown(shape));
    out.push_back(*natural(size));
  }
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
    std::ranges::sort(files);
  }
  if (files.empty()) bad_input("{}: expected rank_0000.safetensors and those of the other ranks, got none", what_);
  for (size_t r = 0; r < files.size(); ++r) open(files[r], r, files.size());
  group_slices();
  read_tokens();
}

void Recording::open(const fs::path& file, size_t rank, size_t ranks) {
  const Safetensors& all = *files_.emplace_back(std::make_unique<Safetensors>(file, true));
  names_.push_back(file.filename().string());
  const std::string& what = all.what();
  const auto text = [&](const char* key, const std::string& missing) {
    const auto found = all.metadata().find(key);
    return found == all.metadata().end() ? missing : found->second;
  };
  const bool recorded = all.metadata().contains("tessera_recording");
  if (!recorded && !all.contains("input_ids") && !all.contains("loss"))
    bad_input("{}: expected a recording or a dump, got other tensors", what);
  if (recorded && text("tessera_recording", "") != "1")
    bad_input("{}: expected version 1 of recordings, got {}", what, text("tessera_recording", ""));
  const std::string count = text("ranks", "1"), here = text("rank", "0"), step = text("step", "1");
  if (here != std::to_string(rank) || count != std::to_string(ranks) || ranks > kMaxRanks)
    bad_input("{}: expected rank {} of {} files, got rank {} of {} ranks", what, rank, ranks, here, count);
  if (rank > 0 && step != std::to_string(step_))
    bad_input("{}: expected step {} as on rank 0, got {}", what, step_, step);
  step_ = std::strtoll(step.c_str(), nullptr, 10);
  RankInfo& info = ranks_.emplace_back();
  info.info = parse_json(text("info", "{}"), what + ": info", JsonFile::others);
  const Json tensors = parse_json(text("tensors", "{}"), what + ": tensors", JsonFile::others);
  if (!info.info.is_object() || !tensors.is_object()) bad_input("{}: info, tensors: expected objects", what);
  for (const auto& [axis, place] : value_at(info.info, "axes").items()) {
    if (!place.is_array() || place.size() != 2 || !natural(place[0]) || !natural(place[1]) ||
        *natural(place[0]) >= *natural(place[1]))
      bad_input("{}: axes: expected {{\"{}\": [coordinate, size]}}, got {}", what, axis, shown(place));
    info.axes[axis] = {*natural(place[0]), *natural(place[1])};
    if (axis.starts_with("dp")) info.data = info.data * *natural(place[1]) + *natural(place[0]);
  }
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
  Batch batch{0, 0};
  if (!entry.is_null()) {
    const auto kind = std::ranges::find(kKinds, entry.value("kind", ""));
    if (kind == kKinds.end())
      bad_input("{}: kind: expected one of {}, got {}", what, fmt::join(kKinds, ", "), shown(value_at(entry, "kind")));
    key = {static_cast<Kind>(kind - kKinds.begin()), entry.value("name", bytes.name)};
    if (!value_at(entry, "shape").is_null()) shape = parse_shape(entry["shape"], what);
    slice.index = parse_index(value_at(entry, "index"), shape, what);
    batch.second = natural(value_at(entry, "microbatch")).value_or(0);
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
    if (tensor.shape.size() != 2) bad_input("{}: input_ids: expected (B, T), got {} dims", what_, tensor.shape.size());
    const auto found = targets ? targets->find(batch) : std::map<Batch, StoredTensor>::const_iterator();
    const bool has_targets = targets && found != targets->end() && found->second.shape == tensor.shape;
    for (int64_t row = 0; row < tensor.shape[0]; ++row) {
      read(tensor, 0, {row, row + 1}, values);
      trained.assign(values.size(), -1);
      if (has_targets) read(found->second, 0, {row, row + 1}, trained);
      TokenRow& made = rows_.emplace_back(TokenRow{batch, row, {}, {}});
      made.used = std::ssize(values);
      int64_t used = 0;
      for (size_t i = 0; i < values.size(); ++i) {
        if (std::isnan(values[i])) bad_input("{}: input_ids: token {} of row {} is in no slice", what_, i, row);
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

void Recording::read(const StoredTensor& t, size_t replica, Range rows, std::vector<double>& out) const {
  const int64_t width = t.width();
  out.assign(static_cast<size_t>(rows.size() * width), kUnset);
  const size_t outer = t.shape.empty() ? 0 : t.shape.size() - 1;
  std::vector<double> values;
  for (const Slice& slice : t.replicas[replica]) {
    const std::vector<Range> columns = t.shape.empty() ? std::vector<Range>{{0, 1}} : dim_ranges(slice, t.shape, outer);
    const int64_t stored = count_indices(columns);
    std::vector<std::vector<Range>> index;
    for (size_t d = 0; d < outer; ++d) index.push_back(dim_ranges(slice, t.shape, d));
    values.resize(static_cast<size_t>(stored));
    for (int64_t row = rows.begin; row < rows.end; ++row) {
      int64_t local = 0, scale = 1, rest = row;
      for (size_t d = outer; d-- > 0 && local >= 0; rest /= t.shape[d]) {
        const int64_t here = local_index(index[d], rest % t.shape[d]);
        local = here < 0 ? -1 : local + here * scale;
        scale *= count_indices(index[d]);
      }
      if (local < 0) continue;
      decode(*slice.bytes, local * stored, stored, values.data());
      const double* from = values.data();
      double* const to = out.data() + (row - rows.begin) * width;
      for (const Range& range : columns)
        for (int64_t c = range.begin; c < range.end; ++c, ++from) {
          if (!std::isfinite(*from))
            bad_input("{}: tensor '{}': expected finite values, got {} at row {}, column {}",
                      files_[static_cast<size_t>(slice.rank)]->what(), slice.bytes->name, *from, row, c);
          to[c] = std::isnan(to[c]) ? *from : to[c] + *from;  // partial sums; otherwise slices do not overlap
        }
    }
  }
}

int Recording::owner(const StoredTensor& t, size_t replica, int64_t row, int64_t column) const {
  for (const Slice& slice : t.replicas[replica]) {
    bool inside = t.shape.empty() || local_index(dim_ranges(slice, t.shape, t.shape.size() - 1), column) >= 0;
    int64_t rest = row;
    for (size_t d = t.shape.empty() ? 0 : t.shape.size() - 1; d-- > 0; rest /= t.shape[d])
      inside = inside && local_index(dim_ranges(slice, t.shape, d), rest % t.shape[d]) >= 0;
    if (inside) return slice.rank;
  }
  return -1;
}

std::vector<std::string> Recording::differing_axes(const StoredTensor& t, size_t a, size_t b) const {
  std::vector<std::string> out;
  for (const Slice& x : t.replicas[a])
    for (const Slice& y : t.replicas[b]) {
      if (x.partial != y.partial || !overlap(x, y, t.shape)) continue;
      const RankInfo &left = ranks_[static_cast<size_t>(x.rank)], &right = ranks_[static_cast<size_t>(y.rank)];
      std::vector<std::string> differing;
      for (const auto& [axis, place] : left.axes)
        if (const auto found = right.axes.find(axis); found != right.axes.end() && found->second != place)
          differing.push_back(axis);
      if (out.empty() || (!differing.empty() && differing.size() < out.size())) out = differing;
    }
  return out;
}

}  // namespace tessera::audit
