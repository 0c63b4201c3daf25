// Gathering and reading, unit by unit.
#include "app/whole_state.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <functional>

#include "tensor/error.h"

namespace tessera {
namespace {

// `shard(u)` is this rank's part of unit u's tensor, undefined where it has none.
void gather_slots(Trainer& trainer, const std::string& suffix, const std::function<Tensor(size_t)>& shard,
                  std::vector<NamedTensor>& out) {
  const std::vector<Module::Unit> layout = trainer.model().layout();
  for (size_t u = 0; u < layout.size(); ++u) {
    const Tensor whole = trainer.strategy().gather(u, shard(u));
    if (trainer.world().rank() != 0) continue;
    for (const Slot& slot : layout[u].slots)
      out.push_back({slot.name + suffix, whole.narrow(0, slot.begin, slot.shape.numel()).reshape(slot.shape)});
  }
}

// The tensors that this rank's optimizer keeps of one kind, by unit; undefined where it has none.
std::vector<Tensor> state_by_unit(Trainer& trainer, const std::string& kind) {
  std::vector<Tensor> out;
  for (const Module::Unit& unit : trainer.model().layout()) {
    Tensor found;
    for (const NamedTensor& state : trainer.optimizer().state())
      if (state.name == unit.name + "." + kind) found = state.tensor;
    out.push_back(found);
  }
  return out;
}

// What an optimizer keeps, known on ranks too that keep nothing.
std::vector<std::string> kinds_of(Trainer& trainer, const std::string& optimizer) {
  std::vector<std::string> kinds =
      optimizer == "sgd" ? std::vector<std::string>{"momentum"} : std::vector<std::string>{"m", "v"};
  if (trainer.model().layout()[0].parameters[0]->var.dtype() == DType::bfloat16) kinds.emplace_back("master");
  return kinds;
}

// The elements of `part`, whose slots may begin before or end past it, from the file's whole tensors.
void read_slots(const Safetensors& file, const std::string& suffix, const std::vector<Slot>& slots,
                const Tensor& part) {
  for (const Slot& slot : slots) {
    const int64_t from = std::max(slot.begin, int64_t{0}), to = std::min(slot.begin + slot.shape.numel(), part.numel());
    if (from >= to) continue;
    const TensorBytes& whole = file.at(slot.name + suffix);
    const std::vector<int64_t> shape(slot.shape.begin(), slot.shape.end());
    if (whole.dtype != part.dtype() || whole.shape != shape)
      throw InputError(fmt::format("the checkpoint's '{}' does not fit: expected {} {}", whole.name,
                                   name_of(part.dtype()), slot.shape.str()));
    const int64_t element = size_of(part.dtype());
    std::memcpy(part.narrow(0, from, to - from).raw(), whole.bytes.data() + (from - slot.begin) * element,
                static_cast<size_t>((to - from) * element));
  }
}

}  // namespace

std::vector<NamedTensor> whole_values(Trainer& trainer) {
  std::vector<NamedTensor> out;
  const std::vector<FlatUnit>& shards = trainer.strategy().shards();
  gather_slots(
      trainer, "", [&](size_t u) { return u < shards.size() ? shards[u].values : Tensor(); }, out);
  return out;
}

std::vector<NamedTensor> whole_gradients(Trainer& trainer) {
  std::vector<NamedTensor> out;
  const std::vector<FlatUnit>& shards = trainer.strategy().shards();
  gather_slots(
      trainer, "", [&](size_t u) { return u < shards.size() ? shards[u].grads : Tensor(); }, out);
  return out;
}

std::vector<NamedTensor> whole_state(Trainer& trainer, const std::string& optimizer) {
  std::vector<NamedTensor> out;
  for (const std::string& kind : kinds_of(trainer, optimizer)) {
    const std::vector<Tensor> parts = state_by_unit(trainer, kind);
    const bool kept = trainer.world().max(parts[0].defined() ? 1 : 0) > 0;  // sgd without momentum keeps none
    if (kept)
      gather_slots(
          trainer, "." + kind, [&](size_t u) { return parts[u]; }, out);
  }
  return out;
}

void read_values(Trainer& trainer, const Safetensors& file) {
  for (const FlatUnit& unit : trainer.strategy().residents()) {
    read_slots(file, "", unit.slots, unit.values);
    ++unit.values.storage()->version;
  }
}

void read_state(Trainer& trainer, const Safetensors& file) {
  for (const NamedTensor& state : trainer.optimizer().state())
    for (const FlatUnit& unit : trainer.optimizer().units()) {
      if (!state.name.starts_with(unit.name + ".")) continue;
      const std::string kind = state.name.substr(unit.name.size());
      if (kind.find('.', 1) == std::string::npos)  // else of a unit whose name begins with this one's
        read_slots(file, kind, unit.slots, state.tensor);
    }
}

}  // namespace tessera
