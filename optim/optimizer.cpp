// What optimizers share: the checks of their units, and their state tensors.
#include "optim/optimizer.h"

#include <fmt/format.h>

#include "optim/adam.h"
#include "optim/muon.h"
#include "optim/sgd.h"

namespace tessera {
namespace {

void check_unit(const FlatUnit& unit) {
  const Tensor &values = unit.values, &grads = unit.grads;
  if (!is_floating(values.dtype()) || values.rank() != 1 || !values.is_contiguous())
    throw Error(fmt::format("[optimizer] values of {} are {}; expected a contiguous floating tensor of rank 1",
                            unit.name, values.describe()));
  if (!is_floating(grads.dtype()) || grads.shape() != values.shape() || !grads.is_contiguous())
    throw Error(fmt::format("[optimizer] gradients of {} are {}; expected a contiguous floating tensor of shape {}",
                            unit.name, grads.describe(), values.shape().str()));
  const Slot* before = nullptr;
  for (const Slot& slot : unit.slots) {
    if (before != nullptr && slot.begin < before->end())
      throw Error(fmt::format("[optimizer] slot {} of {} begins at {}, inside slot {}; slots must not overlap",
                              slot.parameter->name, unit.name, slot.begin, before->parameter->name));
    before = &slot;
  }
}

void check_options(const OptimizerOptions& o) {
  const auto fraction = [](const char* option, double value) {
    if (!(value >= 0 && value < 1))
      throw Error(fmt::format("[optimizer] {} is {}; expected a number in [0, 1)", option, value));
  };
  fraction("momentum", o.momentum);
  fraction("beta1", o.beta1);
  fraction("beta2", o.beta2);
  if (!(o.eps > 0)) throw Error(fmt::format("[optimizer] eps is {}; expected a number above 0", o.eps));
  if (o.state != DType::float32 && o.state != DType::bfloat16)
    throw Error(fmt::format("[optimizer] state is {}; expected float32 or bfloat16", name_of(o.state)));
  if (!(o.weight_decay >= 0))
    throw Error(fmt::format("[optimizer] weight_decay is {}; expected a number of at least 0", o.weight_decay));
}

}  // namespace

Optimizer::Optimizer(std::vector<FlatUnit> units, const OptimizerOptions& options)
    : units_(std::move(units)), options_(options) {
  std::erase_if(units_, [](const FlatUnit& unit) { return !unit.trainable(); });
  for (const FlatUnit& unit : units_) check_unit(unit);
  for (const FlatUnit& unit : units_)
    if (rounds(unit) && unit.grads.device() != Device::cpu)
      throw Error(fmt::format("[optimizer] state of {} is bfloat16 on a GPU; expected the CPU, or float32", unit.name));
}

void Optimizer::step(double lr, double grad_scale) {
  UpdateNumbers now = next(lr);
  now.grad_scale = grad_scale;
  update(now, nullptr);
  count_step();
}

void Optimizer::count_step() {
  ++steps_;
  for (const FlatUnit& unit : units_) ++unit.values.storage()->version;
}

Tensor Optimizer::add_state(const FlatUnit& unit, std::string_view suffix, DType dtype) {
  const ArenaPtr& arena = options_.state_arena ? options_.state_arena : unit.grads.arena();
  Tensor t = Tensor::empty(unit.values.shape(), dtype, arena, Category::optimizer);
  t.fill(0);
  state_.push_back({unit.name + "." + std::string(suffix), t});
  return t;
}

Tensor Optimizer::add_master(const FlatUnit& unit) {
  const bool is_copy = unit.values.dtype() == DType::bfloat16 && !rounds(unit);
  Tensor master = is_copy ? add_state(unit, "master", DType::float32) : unit.values;
  if (is_copy) master.copy_from(master.device() == unit.values.device() ? unit.values : unit.values.on_host());
  masters_.push_back(master);
  return master;
}

const std::vector<NamedTensor>& Optimizer::state() const {
  if (options_.state_arena)
    for (const FlatUnit& unit : units_) wait_for(unit.grads.arena());
  return state_;
}

std::unique_ptr<Optimizer> make_optimizer(OptimizerKind kind, std::vector<FlatUnit> units,
                                          const OptimizerOptions& options) {
  check_options(options);
  if (kind == OptimizerKind::sgd) return std::make_unique<Sgd>(std::move(units), options);
  if (kind == OptimizerKind::muon) return std::make_unique<Muon>(std::move(units), options);
  return std::make_unique<Adam>(std::move(units), options,
                                kind == OptimizerKind::adam ? Decay::coupled : Decay::decoupled);
}

}  // namespace tessera
