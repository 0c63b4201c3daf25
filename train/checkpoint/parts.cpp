// Reading full tensors from files or slices.

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <system_error>
#include <vector>

#include "base/bad_input.h"
#include "base/json.h"
#include "models/layout.h"
#include "models/stages.h"
#include "parallel/comm/fake_transport.h"
#include "train/checkpoint/full_state.h"

namespace tessera {

namespace fs = std::filesystem;
namespace {

using Json = nlohmann::json;

constexpr const char* kParts = "parts";
constexpr int64_t kMaxElements = int64_t{1} << 56;

std::vector<fs::path> part_files(const fs::path& checkpoint, const std::string& stem) {
  std::vector<fs::path> out;
  for (const fs::path& file : list_entries(checkpoint))
    if (file.filename().string().starts_with(stem + ".rank-")) out.push_back(file);
  std::ranges::sort(out);
  return out;
}

SavedSlice parse_part(const std::string& name, const Json& j, const std::string& what) {
  const auto refuse = [&]() -> InputError {
    return InputError(fmt::format(
        "{}: slice of '{}': expected shape, dim, runs and begin, with elements within the shape", what, name));
  };
  SavedSlice slice{.name = name};
  if (!j.is_object() || !j.contains("shape") || !j["shape"].is_array() || j["shape"].size() > kMaxDims) throw refuse();
  int64_t elements = 1;
  for (const Json& size : j["shape"]) {
    const std::optional<int64_t> n = natural(size);
    if (!n || *n < 1 || *n > kMaxElements / elements) throw refuse();
    slice.full_shape.push_back(*n);
    elements *= *n;
  }
  const std::optional<int64_t> begin = natural(j.value("begin", Json())), dim = natural(j.value("dim", Json()));
  const Json runs = j.value("runs", Json());
  if (!begin || !dim || *dim > slice.full_shape.ndim() || !runs.is_array()) throw refuse();
  slice.begin = *begin;
  slice.shard.dim = static_cast<int>(*dim);
  for (int64_t at = 0; const Json& run : runs) {
    const auto first = run.is_array() && run.size() == 2 ? natural(run[0]) : std::nullopt,
               size = first ? natural(run[1]) : first;
    if (!size || *size < 1 || *dim == slice.full_shape.ndim() || *first < at ||
        *first > slice.full_shape[slice.shard.dim] || *size > slice.full_shape[slice.shard.dim] - *first)
      throw refuse();
    slice.shard.runs.push_back({*first, *size});
    at = *first + *size;
  }
  return slice;
}

}  // namespace

std::string part_name(const std::string& stem, size_t rank, size_t ranks) {
  return fmt::format("{}.rank-{}-of-{}.safetensors", stem, rank, ranks);
}

std::string describe_parts(const std::vector<SavedSlice>& slices) {
  Json out = Json::object();
  for (const SavedSlice& p : slices) {
    Json runs = Json::array();
    for (const ShardSpec::Run& run : p.shard.runs) runs.push_back({run.begin, run.size});
    out[p.name] = {{"shape", std::vector<int64_t>(p.full_shape.begin(), p.full_shape.end())},
                   {"dim", p.shard.dim},
                   {"runs", std::move(runs)},
                   {"begin", p.begin}};
  }
  return out.dump();
}

std::vector<SavedSlice> parse_parts(std::string_view text, const std::string& what) {
  const Json json = parse_json(text, what);
  if (!json.is_object()) throw InputError(what + ": the metadata \"parts\" is not a JSON object");
  std::vector<SavedSlice> out;
  for (const auto& [name, described] : json.items()) out.push_back(parse_part(name, described, what));
  return out;
}

bool SavedTensors::are_in(const fs::path& checkpoint, const std::string& stem) {
  std::error_code error;
  return fs::exists(checkpoint / (stem + ".safetensors"), error) || !part_files(checkpoint, stem).empty();
}

SavedTensors::SavedTensors(const fs::path& checkpoint, const std::string& stem)
    : what_((checkpoint / (stem + ".safetensors")).string()) {
  std::error_code error;
  std::vector<fs::path> names{what_};
  if (!fs::exists(what_, error)) names = part_files(checkpoint, stem);
  if (names.empty()) bad_input("{}: neither this file nor its rank files exist", what_);
  for (const fs::path& name : names) {
    files_.push_back(std::make_unique<Safetensors>(name));
    add(*files_.back(), name.string());
  }
}

void SavedTensors::add(const Safetensors& file, const std::string& what) {
  std::map<std::string, SavedSlice> slices;
  const auto described = file.metadata().find(kParts);
  if (described != file.metadata().end())
    for (SavedSlice& p : parse_parts(described->second, what)) slices.emplace(p.name, std::move(p));
  for (const TensorBytes& t : file.tensors()) {
    const auto found = slices.find(t.name);
    if (described != file.metadata().end() && found == slices.end())
      bad_input("{}: the metadata \"parts\" does not list tensor '{}'", what, t.name);
    if (t.shape.size() > kMaxDims) bad_input("{}: tensor '{}' has more than six dimensions", what, t.name);
    SavedSlice slice = found != slices.end() ? found->second : SavedSlice{.name = t.name, .full_shape = Shape(t.shape)};
    slice.count = std::ssize(t.bytes) / element_size(t.dtype);
    if (const int64_t stored = slice.shard.slice_unit(slice.full_shape).numel(); slice.count > stored - slice.begin)
      bad_input("{}: tensor '{}' has {} elements starting at {}, but its slice ends at {}", what, t.name, slice.count,
                slice.begin, stored);
    const std::vector<int64_t> shape(slice.full_shape.begin(), slice.full_shape.end());
    Stored& full = all_.try_emplace(t.name, Stored{t.dtype, shape, {}}).first->second;
    if (full.dtype != t.dtype || full.shape != shape)
      bad_input("{}: tensor '{}' differs in dtype or shape from the other rank files", what, t.name);
    full.slices.push_back({&t, std::move(slice)});
  }
}

void SavedTensors::expect_no_others(const std::set<std::string>& names) const {
  for (const auto& [name, full] : all_)
    if (!names.contains(name))
      throw InputError(fmt::format("{}: the model has no tensor '{}'; expected tensors of {} parameters", what_, name,
                                   names.size()));
}

const SavedTensors::Stored& SavedTensors::at(const std::string& name) const {
  const auto found = all_.find(name);
  if (found == all_.end()) bad_input("{}: no tensor '{}'", what_, name);
  return found->second;
}

TensorReader SavedTensors::reader(const std::string& name) const {
  const Stored& full = at(name);
  struct Run {
    int64_t begin, count;
    const std::byte* at;
  };
  std::vector<Run> runs;  // by position in the full tensor
  const int64_t element = element_size(full.dtype);
  for (const auto& [bytes, slice] : full.slices)
    for_each_run(slice.full_shape, slice.shard, slice.begin, slice.begin + slice.count,
                 [&, data = bytes->bytes.data(), first = slice.begin](int64_t here, int64_t begin, int64_t count) {
                   runs.push_back({begin, count, data + (here - first) * element});
                 });
  std::ranges::sort(runs, {}, &Run::begin);
  const bool shared = full.dtype == DType::uint8;  // slices of a 4-bit matrix share some bytes
  for (size_t i = 1; i < runs.size() && !shared; ++i)
    if (runs[i].begin < runs[i - 1].begin + runs[i - 1].count)
      bad_input("{}: element {} of '{}' is in two slices", what_, runs[i].begin, name);
  return [runs = std::move(runs), element, what = what_, name](int64_t begin, std::span<std::byte> to) {
    auto run = std::ranges::upper_bound(runs, begin, {}, &Run::begin);
    if (run != runs.begin()) --run;
    while (!to.empty()) {
      if (run == runs.end() || begin < run->begin || begin >= run->begin + run->count)
        bad_input("{}: element {} of '{}' is in none of the files", what, begin, name);
      const int64_t skipped = begin - run->begin, count = std::min(run->count - skipped, std::ssize(to) / element);
      std::memcpy(to.data(), run->at + skipped * element, static_cast<size_t>(count * element));
      to = to.subspan(static_cast<size_t>(count * element));
      begin += count;
      ++run;
    }
  };
}

FullTensors SavedTensors::tensors() const {
  return [this](const std::string& name, DType dtype, const Shape& shape) {
    const Stored& full = at(name);
    if (full.dtype != dtype || full.shape != std::vector<int64_t>(shape.begin(), shape.end()))
      throw InputError(
          fmt::format("the checkpoint's '{}' does not match: expected {} {}", name, to_string(dtype), shape.str()));
    return reader(name);
  };
}

namespace {

Range saved_range(const Plan& plan, int64_t size, int rank) {
  const Range all{0, size}, none{0, 0};
  if (plan.zero != ZeroStage::none) {
    const int cut = static_cast<int>(shard_group_size(plan));
    return rank < cut ? shard_range(size, cut, rank) : none;
  }
  if (plan.dp_mode == DataMode::ps_sync) return shard_range(size, static_cast<int>(plan.servers), rank);
  return rank == 0 ? all : none;
}

std::vector<std::string> saved_kinds(const TrainConfig& job, bool matrices, int rank) {
  std::vector<std::string> kinds = state_kinds(job.optim, matrices);
  const Plan& plan = job.plan;
  if (plan.dp_mode != DataMode::diloco) return kinds;
  const auto cp = static_cast<int>(plan.cp);
  if (rank % cp != 0) return {};
  kinds.emplace_back("value");
  for (std::string& kind : kinds) kind += suffix_of_copy(rank / cp);
  if (rank > 0) return kinds;
  kinds.emplace_back("common");
  if (plan.outer_momentum > 0) kinds.emplace_back("outer");
  return kinds;
}

}  // namespace

std::vector<std::vector<SavedSlice>> slices_of_ranks(const TrainConfig& job, bool state) {
  const Plan& plan = job.plan;
  if (plan.dp_mode == DataMode::ps_async)
    throw FieldError("dp_mode", "ps-async servers save full tensors; expected a different mode");
  const Schedule schedule = make_schedule(plan);
  const auto data_ranks = static_cast<int>(plan.dp * plan.cp), tp_ranks = static_cast<int>(plan.tp);
  ModelConfig config = model_config(job, job.model.vocab);
  config.tie_copies = plan.tie_copies || schedule.stages > 1;
  std::vector<std::vector<SavedSlice>> out(static_cast<size_t>(plan.ranks()));
  for (int tp = 0; tp < tp_ranks; ++tp) {
    Communicator axis(std::make_unique<FakeTransport>(tp, tp_ranks), "tp");
    const std::unique_ptr<LanguageModel> model = build_model(job.make, config);
    model->place({.tp = &axis, .between = plan.sp ? S(1, config.context / plan.cp) : I});
    const std::vector<Module::Unit> units = model->layout();
    const std::vector<int> stages = stages_of_units(*model, split_layers(*model, schedule.stages));
    for (size_t u = 0; u < units.size(); ++u) {
      if (state && !units[u].trainable) continue;
      const int pp = schedule.rank_of_stage[static_cast<size_t>(stages[u])];
      for (int data = 0; data < data_ranks; ++data) {
        const bool apart = state && plan.dp_mode == DataMode::diloco;
        const Range range = apart ? Range{0, units[u].size} : saved_range(plan, units[u].size, data);
        const int number = (pp * data_ranks + data) * tp_ranks + tp;
        std::vector<SavedSlice>& rank = out[static_cast<size_t>(number)];
        const std::vector<std::string> kinds =
            state ? saved_kinds(job, units[u].matrices, data) : std::vector<std::string>{""};
        for (const Slot& slot : units[u].slots) {
          const Parameter& p = *slot.parameter;
          const int64_t from = std::max(slot.begin, range.begin), to = std::min(slot.end(), range.end);
          if (from >= to || p.is_copy() || (p.shard.is_replicated() && tp > 0)) continue;
          for (const std::string& kind : kinds)
            rank.push_back({kind.empty() ? p.source() : p.source() + "." + kind,
                            p.stored(),
                            {.axis = {}, .dim = p.stored_shard().dim, .runs = p.stored_shard().runs},
                            from - slot.begin,
                            to - from});
        }
      }
    }
  }
  return out;
}

}  // namespace tessera
