// Gathering and reading, unit by unit.
#include "train/whole_state.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <functional>

#include "tensor/error.h"

namespace tessera {
namespace {

// Takes this rank's part of a parameter to the whole that rank 0 of the tensor axis puts together, where it returns it.
// The others send their elements, after their numbers in the whole.
Tensor join_shards(Mesh& mesh, const Slot& slot, const Tensor& part) {
  const Parameter& parameter = *slot.parameter;
  if (parameter.shard.is_whole()) return part;
  Communicator& tp = mesh[parameter.shard.axis];
  std::vector<int64_t> runs;  // of elements: begin in the whole, count
  for_each_run(parameter, 0, slot.size, [&](int64_t, int64_t whole, int64_t count) {
    runs.insert(runs.end(), {whole, count});
  });
  const auto sizes = [&](int64_t count, int64_t elements) {
    return Tensor::of<int64_t>(std::vector<int64_t>{count, elements}, {2}, part.arena());
  };
  const auto length = std::ssize(runs);
  if (tp.rank() != 0) {
    tp.send(sizes(length, part.numel()), 0);
    tp.send(Tensor::of<int64_t>(runs, {length}, part.arena()), 0);
    tp.send(part.contiguous(), 0);
    return {};
  }
  Tensor whole = part.make(parameter.whole, part.dtype(), Category::workspace);
  const auto place = [&](const int64_t* run, int64_t count, const Tensor& from) {
    const int64_t element = size_of(from.dtype());
    for (int64_t r = 0, at = 0; r < count; at += run[r + 1], r += 2)
      std::memcpy(whole.raw() + run[r] * element, from.raw() + at * element, static_cast<size_t>(run[r + 1] * element));
  };
  place(runs.data(), length, part.contiguous());
  for (int r = 1; r < tp.size(); ++r) {
    const Tensor size = sizes(0, 0);
    tp.recv(size, r);
    const Tensor theirs = Tensor::empty({size.data<int64_t>()[0]}, DType::int64, part.arena());
    tp.recv(theirs, r);
    const Tensor elements = part.make({size.data<int64_t>()[1]}, part.dtype(), Category::workspace);
    tp.recv(elements, r);
    place(theirs.data<int64_t>(), theirs.numel(), elements);
  }
  return whole;
}

// What is gathered: what its names end with, and its dtype.
struct Kind {
  std::string suffix;
  DType dtype;
  bool of_frozen = false;
};

// `shard(name)` is this rank's part of a unit's tensor, undefined where it has none. Gathered over the data axis, then
// over the tensor axis, then sent to rank 0 of the pipeline; units in the order of the whole model, a copy of a tied
// weight left out.
void gather_slots(Trainer& trainer, const Kind& kind, const std::function<Tensor(const std::string&)>& shard,
                  std::vector<NamedTensor>& out) {
  Mesh& mesh = trainer.mesh();
  const std::vector<Module::Unit> here = trainer.model().layout();
  const std::vector<Module::Unit> units = trainer.whole_model().layout();
  for (size_t u = 0; u < units.size(); ++u) {
    const Module::Unit& unit = units[u];
    if (!unit.trainable && !kind.of_frozen) continue;
    const int owner = trainer.pipeline_rank_of(u);
    const bool mine = owner == mesh.coordinate("pp"), wanted = trainer.world().rank() == 0;
    if (!mine && !wanted) continue;
    const auto own = std::ranges::find_if(here, [&](const Module::Unit& one) { return one.name == unit.name; });
    Tensor gathered;
    if (mine) gathered = trainer.strategy().gather(static_cast<size_t>(own - here.begin()), shard(unit.name));
    if (gathered.defined()) gathered = gathered.on_host();
    if (trainer.data_axis().rank() != 0) continue;
    for (size_t i = 0; i < unit.slots.size(); ++i) {
      Tensor whole;
      if (mine) {
        const Slot& slot = own->slots[i];
        whole = join_shards(mesh, slot, gathered.narrow(0, slot.begin, slot.size).reshape(slot.parameter->local()));
        if (wanted) {
          out.push_back({unit.slots[i].parameter->name + kind.suffix, whole});
        } else if (mesh.coordinate("tp") == 0) {
          mesh["pp"].send(whole.contiguous(), 0);
        }
      } else {
        const Parameter& parameter = *unit.slots[i].parameter;
        whole = Tensor::empty(parameter.whole, kind.dtype, trainer.arena()->host(), Category::workspace);
        mesh["pp"].recv(whole, owner);
        out.push_back({parameter.name + kind.suffix, whole});
      }
    }
  }
}

// The tensor that this rank's optimizer keeps of one kind for a unit; undefined where it has none.
Tensor state_of(Trainer& trainer, const std::string& unit, const std::string& kind) {
  const std::string name = unit + "." + kind;
  for (const NamedTensor& state : trainer.optimizer().state())
    if (state.name == name) return state.tensor;
  return {};
}

DType value_dtype(Trainer& trainer) { return trainer.model().layout()[0].slots[0].parameter->var.dtype(); }

// What this rank's optimizer updates of a unit; without tensors where that is nothing.
FlatUnit shard_of(Trainer& trainer, const std::string& unit) {
  for (const FlatUnit& shard : trainer.strategy().shards())
    if (shard.name == unit) return shard;
  return {};
}

// The elements of `part`, in the host's memory, whose slots may begin before or end past it, from whole tensors.
void read_slots(const WholeTensors& source, const std::string& suffix, const std::vector<Slot>& slots,
                const Tensor& part) {
  for (const Slot& slot : slots) {
    const int64_t from = std::max(slot.begin, int64_t{0}), to = std::min(slot.end(), part.numel());
    if (from >= to) continue;
    const Parameter& parameter = *slot.parameter;
    const std::byte* const elements = source(parameter.source() + suffix, part.dtype(), parameter.whole);
    const int64_t element = size_of(part.dtype());
    for_each_run(parameter, from - slot.begin, to - slot.begin, [&](int64_t here, int64_t there, int64_t count) {
      std::memcpy(part.narrow(0, slot.begin + here, count).raw(), elements + there * element,
                  static_cast<size_t>(count * element));
    });
  }
}

// The same of a part anywhere: what lies between its slots stays.
void read_any(const WholeTensors& source, const std::string& suffix, const std::vector<Slot>& slots, Tensor part) {
  const Tensor here = part.on_host();
  read_slots(source, suffix, slots, here);
  if (part.device() != Device::cpu) part.copy_from(here);
}

}  // namespace

std::vector<NamedTensor> whole_values(Trainer& trainer) {
  std::vector<NamedTensor> out;
  gather_slots(
      trainer, {"", value_dtype(trainer), true},
      [&](const std::string& unit) { return shard_of(trainer, unit).values; }, out);
  return out;
}

std::vector<NamedTensor> whole_gradients(Trainer& trainer) {
  std::vector<NamedTensor> out;
  gather_slots(
      trainer, {"", trainer.gradient_dtype()}, [&](const std::string& unit) { return shard_of(trainer, unit).grads; },
      out);
  return out;
}

std::vector<std::string> state_kinds(Trainer& trainer) {
  std::vector<std::string> kinds = trainer.job().optim.optimizer == OptimizerKind::sgd
                                       ? std::vector<std::string>{"momentum"}
                                       : std::vector<std::string>{"m", "v"};
  if (value_dtype(trainer) == DType::bfloat16) kinds.emplace_back("master");
  std::erase_if(kinds, [&](const std::string& kind) {  // sgd without momentum keeps none
    const std::vector<NamedTensor>& kept = trainer.optimizer().state();
    const bool here =
        std::ranges::any_of(kept, [&](const NamedTensor& state) { return state.name.ends_with("." + kind); });
    return trainer.world().max(here ? 1 : 0) == 0;
  });
  return kinds;
}

std::vector<NamedTensor> whole_state(Trainer& trainer) {
  const DType wide = wide_of(value_dtype(trainer));
  std::vector<NamedTensor> out;
  for (const std::string& kind : state_kinds(trainer)) {
    gather_slots(
        trainer, {"." + kind, wide}, [&](const std::string& unit) { return state_of(trainer, unit, kind); }, out);
  }
  return out;
}

void read_values(const std::vector<FlatUnit>& units, const WholeTensors& source) {
  for (const FlatUnit& unit : units) {
    read_any(source, "", unit.slots, unit.values);
    ++unit.values.storage()->version;
  }
}

void read_state(const Optimizer& optimizer, const WholeTensors& source) {
  for (const NamedTensor& state : optimizer.state())
    for (const FlatUnit& unit : optimizer.units()) {
      if (!state.name.starts_with(unit.name + ".")) continue;
      const std::string kind = state.name.substr(unit.name.size());
      if (kind.find('.', 1) == std::string::npos)  // else of a unit whose name begins with this one's
        read_any(source, kind, unit.slots, state.tensor);
    }
}

WholeTensors tensors_of(const Safetensors& file) {
  return [&file](const std::string& name, DType dtype, const Shape& shape) {
    const TensorBytes& whole = file.at(name);
    if (whole.dtype != dtype || whole.shape != std::vector<int64_t>(shape.begin(), shape.end()))
      throw InputError(
          fmt::format("the checkpoint's '{}' does not fit: expected {} {}", name, name_of(dtype), shape.str()));
    return reinterpret_cast<const std::byte*>(whole.bytes.data());
  };
}

}  // namespace tessera
