// Slices of full tensors: ownership, gathering on rank 0, and loading.
#include "train/checkpoint/full_state.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <iterator>
#include <map>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/error.h"
#include "base/files.h"

namespace tessera {

namespace {

// `flat` is a range of the unit's flat buffer; slots may begin before it or end past it.
void add_parts(const FlatUnit& unit, const Tensor& flat, const std::string& suffix, std::vector<TensorSlice>& out) {
  for (const Slot& slot : unit.slots) {
    const int64_t from = std::max(slot.begin, int64_t{0}), to = std::min(slot.end(), flat.numel());
    if (from < to)
      out.push_back(
          {slot.parameter->source() + suffix, slot.parameter, flat.narrow(0, from, to - from), from - slot.begin});
  }
}

std::vector<TensorSlice> unit_values(const std::vector<FlatUnit>& units) {
  std::vector<TensorSlice> out;
  for (const FlatUnit& unit : units) add_parts(unit, unit.values, "", out);
  return out;
}

std::vector<TensorSlice> optimizer_state(const std::vector<NamedTensor>& all, const std::vector<FlatUnit>& units) {
  std::vector<TensorSlice> out;
  for (const NamedTensor& state : all)
    for (const FlatUnit& unit : units) {
      if (!state.name.starts_with(unit.name + ".")) continue;
      const std::string kind = state.name.substr(unit.name.size());
      if (kind.find('.', 1) == std::string::npos)  // otherwise a longer unit name
        add_parts(unit, state.tensor, kind, out);
    }
  return out;
}

std::vector<TensorSlice> optimizer_state(const Optimizer& optimizer) {
  return optimizer_state(optimizer.state(), optimizer.units());
}

std::vector<TensorSlice> optimizer_state(const DataStrategy& strategy) {
  return strategy.state().empty() ? std::vector<TensorSlice>() : optimizer_state(strategy.state(), strategy.shards());
}

// Optimizer state; with local updates also each replica's values.
std::vector<TensorSlice> apart_state(TrainState& train) {
  std::vector<TensorSlice> out = optimizer_state(train.optimizer());
  const DataStrategy& strategy = train.strategy();
  if (!strategy.layout().local_updates) return out;
  for (const FlatUnit& unit : strategy.shards())
    if (unit.trainable()) add_parts(unit, unit.values, ".value", out);
  for (TensorSlice& h : out) h.name += suffix_of_copy(strategy.copy());
  return out;
}

std::vector<TensorSlice> compute_gradients(TrainState& train) {
  std::vector<TensorSlice> out;
  for (const FlatUnit& unit : train.strategy().shards())
    if (unit.trainable()) add_parts(unit, unit.grads, "", out);
  return out;
}

// Replicas are saved by the first rank, or by the ranks of `copy` on the data axis; copies of a tied weight are not
// saved.
std::vector<TensorSlice> own(TrainState& train, std::vector<TensorSlice> held, std::optional<int> copy = 0) {
  const int mine = train.strategy().copy();
  // Without sharding, an ep group holds one copy of the experts; otherwise each sharding group does.
  const bool everything = train.strategy().layout().sharding == ShardingKind::everywhere;
  const int neighbours = everything ? static_cast<int>(train.job.plan.ep) : 1;
  if (train.strategy().layout().local_updates && train.groups.mesh.coordinate("cp") > 0)
    return {};  // context ranks form one replica
  std::erase_if(held, [&](const TensorSlice& h) {
    const ShardSpec& shard = h.parameter->shard;
    const int alike = h.parameter->is_expert ? neighbours : 1;
    const bool copied = copy && mine / alike != *copy / alike;  // unset: all replicas are saved
    return copied || h.parameter->is_copy() || (shard.is_replicated() && train.groups.mesh.coordinate("tp") > 0);
  });
  return held;
}

std::vector<FullTensor> list(TrainState& train, DType dtype, bool of_frozen) {
  std::vector<FullTensor> out;
  for (const Module::Unit& unit : train.full_model().layout())
    for (const Slot& slot : unit.slots)
      if (unit.trainable || of_frozen)
        out.push_back({slot.parameter->name, unit.dtype(dtype), slot.parameter->stored()});
  return out;
}

// A rank's table lists its contiguous runs: tensor, start within it, length.
std::vector<NamedTensor> gather(TrainState& train, const std::vector<FullTensor>& all,
                                const std::vector<TensorSlice>& mine) {
  Communicator& world = train.groups.world;
  const ArenaPtr host = train.arena->host();
  std::map<std::string, int64_t> index;
  for (const FullTensor& t : all) index.emplace(t.name, std::ssize(index));
  std::vector<int64_t> table;
  int64_t count = 0;  // bytes
  for (const TensorSlice& h : mine) {
    for_each_run(*h.parameter, h.begin, h.begin + h.part.numel(), [&](int64_t, int64_t full_begin, int64_t length) {
      table.insert(table.end(), {index.at(h.name), full_begin, length});
    });
    count += h.part.nbytes();
  }
  const auto make_tensor = [&](const std::vector<int64_t>& v) { return Tensor::of<int64_t>(v, {std::ssize(v)}, host); };
  const auto make_buffer = [&](int64_t n) { return Tensor::empty({n}, DType::uint8, host, Category::workspace); };
  if (all.empty()) return {};
  const Tensor elements = make_buffer(count);
  for (int64_t at = 0; const TensorSlice& h : mine) {
    const Tensor here = h.part.on_host();
    std::memcpy(elements.raw() + at, here.raw(), static_cast<size_t>(here.nbytes()));
    at += here.nbytes();
  }
  if (world.rank() > 0) {
    world.send(make_tensor({std::ssize(table), count}), 0);
    world.send(make_tensor(table), 0);
    world.send(elements, 0);
    return {};
  }
  std::vector<NamedTensor> out;
  for (const FullTensor& t : all) out.push_back({t.name, Tensor::empty(t.shape, t.dtype, host, Category::workspace)});
  const auto place = [&](const Tensor& runs, const Tensor& from) {
    const std::byte* at = from.raw();
    for (const int64_t *run = runs.data<int64_t>(), *const end = run + runs.numel(); run < end; run += 3) {
      const Tensor& to = out[static_cast<size_t>(run[0])].tensor;
      const int64_t element = element_size(to.dtype());
      std::memcpy(to.raw() + run[1] * element, at, static_cast<size_t>(run[2] * element));
      at += run[2] * element;
    }
  };
  place(make_tensor(table), elements);
  for (int r = 1; r < world.size(); ++r) {
    const Tensor sizes = make_tensor({0, 0});
    world.recv(sizes, r);
    const Tensor runs = Tensor::empty({sizes.data<int64_t>()[0]}, DType::int64, host);
    world.recv(runs, r);
    const Tensor theirs = make_buffer(sizes.data<int64_t>()[1]);
    world.recv(theirs, r);
    place(runs, theirs);
  }
  return out;
}

void read_parts(const std::vector<TensorSlice>& slices, const FullTensors& source) {
  for (const TensorSlice& h : slices) {
    const TensorReader full = source(h.name, h.part.dtype(), h.parameter->stored());
    if (!full) continue;
    const Tensor here = h.part.on_host();
    const int64_t element = element_size(here.dtype());
    for_each_run(*h.parameter, h.begin, h.begin + here.numel(), [&](int64_t local, int64_t at, int64_t count) {
      full(at, {here.raw() + (local - h.begin) * element, static_cast<size_t>(count * element)});
    });
    if (h.part.device() != Device::cpu) Tensor(h.part).copy_from(here);
  }
}

}  // namespace

std::vector<std::string> state_kinds(const Optimisation& o, bool matrices) {
  const auto names = state_names(update_rule(o.optimizer, o.momentum, matrices));
  std::vector<std::string> kinds(names.begin(), names.end());
  if (o.dtype == DType::bfloat16 && o.state_dtype != DType::bfloat16) kinds.emplace_back("master");
  return kinds;
}

std::string suffix_of_copy(int copy) { return copy == 0 ? "" : fmt::format(".replica{}", copy); }

std::vector<FullTensor> list_values(TrainState& train) { return list(train, train.job.optim.dtype, true); }

namespace {

std::vector<FullTensor> list_state(TrainState& train, int copies, bool values) {
  const Optimisation& o = train.job.optim;
  const std::vector<Module::Unit> units = train.full_model().layout();
  std::vector<FullTensor> out;
  const auto add = [&](const std::string& kind, DType dtype, const std::string& suffix, bool of_rest,
                       bool of_matrices) {
    for (const Module::Unit& unit : units)
      for (const Slot& slot : unit.slots)
        if (unit.trainable && (unit.matrices ? of_matrices : of_rest))
          out.push_back({fmt::format("{}.{}{}", slot.parameter->name, kind, suffix), dtype, slot.parameter->stored()});
  };
  const std::vector<std::string> rest = state_kinds(o), matrices = state_kinds(o, true);
  const auto contains = [](const auto& kinds, const auto& kind) { return std::ranges::count(kinds, kind) > 0; };
  std::vector<std::string> all = rest;  // master copies last
  std::ranges::copy_if(matrices, std::back_inserter(all), [&](const auto& kind) { return !contains(rest, kind); });
  std::stable_partition(all.begin(), all.end(), [](const auto& kind) { return kind != "master"; });
  for (int copy = 0; copy < copies; ++copy) {
    for (const std::string& kind : all)
      add(kind, kind == "master" ? DType::float32 : state_dtype(o), suffix_of_copy(copy), contains(rest, kind),
          contains(matrices, kind));
    if (values) add("value", o.dtype, suffix_of_copy(copy), true, true);
  }
  for (const std::string& kind : train.strategy().state_kinds()) add(kind, accum_dtype(o.dtype), "", true, true);
  return out;
}

}  // namespace

std::vector<FullTensor> list_state(TrainState& train) {
  const bool apart = train.strategy().layout().local_updates;
  return list_state(train, apart ? train.strategy().copies() : 1, apart);
}

std::vector<FlatUnit> model_units(const DataStrategy& strategy) {
  std::vector<FlatUnit> out = strategy.shards();
  if (strategy.agrees()) return out;
  for (FlatUnit& unit : out)
    for (const NamedTensor& saved : strategy.state())
      if (saved.name == unit.name + ".common") unit.values = saved.tensor.to(unit.values.dtype());
  return out;
}

std::vector<TensorSlice> own_values(TrainState& train) {
  return own(train, unit_values(model_units(train.strategy())));
}

std::vector<TensorSlice> own_state(TrainState& train) {
  const bool apart = train.strategy().layout().local_updates;
  std::vector<TensorSlice> out = own(train, apart_state(train), apart ? std::optional<int>() : 0);
  std::ranges::move(own(train, optimizer_state(train.strategy())), std::back_inserter(out));
  return out;
}

std::vector<TensorSlice> own_gradients(TrainState& train) { return own(train, compute_gradients(train)); }

std::vector<TensorSlice> held_between_steps(TrainState& train) {
  const DataStrategy& strategy = train.strategy();
  std::vector<TensorSlice> out = optimizer_state(strategy);
  if (strategy.agrees()) std::ranges::move(unit_values(strategy.resident_units()), std::back_inserter(out));
  std::ranges::move(apart_state(train), std::back_inserter(out));
  return out;
}

std::vector<NamedTensor> full_values(TrainState& train, int copy) {
  return gather(train, list_values(train), own(train, unit_values(train.strategy().shards()), copy));
}

std::vector<NamedTensor> full_gradients(TrainState& train, int copy) {
  return gather(train, list(train, data_options(train.job).grad_dtype, false),
                own(train, compute_gradients(train), copy));
}

std::vector<NamedTensor> full_state(TrainState& train, int copy) {
  std::vector<TensorSlice> held = optimizer_state(train.optimizer());
  std::ranges::move(optimizer_state(train.strategy()), std::back_inserter(held));
  return gather(train, list_state(train, 1, false), own(train, held, copy));
}

std::vector<NamedTensor> full_matrix_state(TrainState& train, bool of_gradients) {
  std::vector<TensorSlice> held =
      own(train, of_gradients ? compute_gradients(train) : unit_values(train.strategy().shards()));
  for (TensorSlice& h : held) {
    const std::vector<int32_t> rank(static_cast<size_t>(h.part.numel()), train.groups.world.rank());
    h.part = Tensor::of<int32_t>(rank, {h.part.numel()}, train.arena->host());
  }
  std::vector<FullTensor> full = list(train, DType::int32, !of_gradients);
  for (FullTensor& t : full) t.dtype = DType::int32;  // also for uint8 tensors
  return gather(train, full, held);
}

void read_values(const std::vector<FlatUnit>& units, const FullTensors& source) {
  read_parts(unit_values(units), source);
  for (const FlatUnit& unit : units) ++unit.values.storage()->version;
}

void read_state(const Optimizer& optimizer, const FullTensors& source) {
  read_parts(optimizer_state(optimizer), source);
}

void read_state(TrainState& train, const FullTensors& source) {
  read_parts(apart_state(train), source);
  read_parts(optimizer_state(train.strategy()), source);
}

void begin_with(const std::vector<FlatUnit>& units, const Optimizer& optimizer, const FullTensors& source) {
  read_values(units, source);
  std::vector<TensorSlice> masters = optimizer_state(optimizer);
  constexpr std::string_view kMaster = ".master";
  std::erase_if(masters, [&](const TensorSlice& h) { return !h.name.ends_with(kMaster); });
  for (TensorSlice& h : masters) h.name.resize(h.name.size() - kMaster.size());
  read_parts(masters, source);
}

TensorReader make_reader(std::span<const std::byte> bytes, DType dtype) {
  return [bytes, element = element_size(dtype)](int64_t begin, std::span<std::byte> to) {
    std::memcpy(to.data(), bytes.subspan(static_cast<size_t>(begin * element), to.size()).data(), to.size());
  };
}

namespace {

// An all-ones exponent means infinity or NaN. The first loop has no early exit so that it vectorizes.
template <class Word>
int64_t first_with(std::span<const std::byte> elements, Word exponent) {
  constexpr int64_t kTogether = 1024;
  const int64_t count = std::ssize(elements) / static_cast<int64_t>(sizeof(Word));
  const auto is_none = [&](int64_t i) {
    Word word;  // a file's elements may be unaligned
    std::memcpy(&word, elements.data() + i * static_cast<int64_t>(sizeof(Word)), sizeof(Word));
    return (word & exponent) == exponent;
  };
  for (int64_t begin = 0; begin < count; begin += kTogether) {
    const int64_t end = std::min(begin + kTogether, count);
    bool any = false;
    for (int64_t i = begin; i < end; ++i) any |= is_none(i);
    for (int64_t i = begin; any && i < end; ++i)
      if (is_none(i)) return i;
  }
  return -1;
}

// Equal on all ranks that hold a replica.
uint64_t slice_hash(const TensorSlice& h) {
  std::string text = h.name;
  const auto add = [&](int64_t n) { text.append(reinterpret_cast<const char*>(&n), sizeof n); };
  for_each_run(*h.parameter, h.begin, h.begin + h.part.numel(),
               [&](int64_t, int64_t full_begin, int64_t count) { add(full_begin), add(count); });
  return checksum(text);
}

// Largest group first, ties by lowest rank.
[[noreturn]] void refuse(const TensorSlice& h, int64_t step, const std::map<int64_t, std::set<int>>& by_value) {
  std::vector<std::set<int>> groups;
  for (const auto& [value, ranks] : by_value) groups.push_back(ranks);
  std::ranges::sort(groups,
                    [](const auto& a, const auto& b) { return a.size() != b.size() ? a.size() > b.size() : a < b; });
  std::vector<std::string> others;
  for (size_t g = 1; g < groups.size(); ++g) others.push_back(ranks_text(groups[g]));
  const bool majority = groups[0].size() > groups[1].size();
  throw Error(fmt::format("step {}: replicas of {} differ between ranks: {}", step, h.name,
                          majority ? fmt::format("{} {} not match {}", fmt::join(others, " and "),
                                                 groups.size() == 2 && groups[1].size() == 1 ? "does" : "do",
                                                 ranks_text(groups[0]))
                                   : fmt::format("{} and {}", ranks_text(groups[0]), fmt::join(others, " and "))),
              Status::communication);
}

}  // namespace

int64_t first_not_finite(DType dtype, std::span<const std::byte> elements) {
  if (dtype == DType::float64) return first_with<uint64_t>(elements, 0x7ff0000000000000u);
  if (dtype == DType::float32) return first_with<uint32_t>(elements, 0x7f800000u);
  if (dtype == DType::bfloat16) return first_with<uint16_t>(elements, 0x7f80u);
  return -1;
}

void check_finite(const std::string& name, const Tensor& x, int64_t step) {
  const Tensor here = x.on_host();
  if (first_not_finite(here.dtype(), {here.raw(), static_cast<size_t>(here.nbytes())}) >= 0)
    throw Error(fmt::format("step {}: {} contains inf or nan after the update; expected finite values. This step is "
                            "not saved; a smaller `lr` may help",
                            step, name),
                Status::not_finite);
}

void check_replicas(TrainState& train) {
  Communicator& world = train.groups.world;
  if (world.size() == 1) return;
  const OpCounts before = world.counts();
  const std::vector<TensorSlice> held = held_between_steps(train);
  const auto max_count = static_cast<int64_t>(world.max(static_cast<double>(held.size())));
  std::vector<int64_t> mine;  // each slice's identity and hash
  for (const TensorSlice& h : held) {
    const Tensor here = h.part.on_host();
    mine.push_back(static_cast<int64_t>(slice_hash(h)));
    mine.push_back(static_cast<int64_t>(
        checksum({reinterpret_cast<const char*>(here.raw()), static_cast<size_t>(here.nbytes())})));
  }
  mine.resize(static_cast<size_t>(2 * max_count));
  const std::vector<int64_t> all = all_gather_values(world, mine, train.arena->host());
  world.reset_counts(before);
  std::map<int64_t, std::map<int64_t, std::set<int>>> by_place;  // ranks by slice and hash
  for (size_t at = 0; at < all.size(); at += 2)
    by_place[all[at]][all[at + 1]].insert(static_cast<int>(at / mine.size()));
  for (size_t i = 0; i < held.size(); ++i)
    if (const auto& by_value = by_place.at(mine[2 * i]); by_value.size() > 1)
      refuse(held[i], train.steps_done(), by_value);
}

}  // namespace tessera
