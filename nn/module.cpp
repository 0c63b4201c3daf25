// Trees of parameters, and how they get their memory.
#include "nn/module.h"

#include <algorithm>

#include "tensor/cpu/vectorize.h"
#include "tensor/random.h"

namespace tessera {
namespace {

constexpr int64_t kSlotAlignment = 16;  // elements: a slot starts on a 64-byte line in float32

// The elements of a parameter from `from` on, to the memory at `values`.
void initialise_elements(const Tensor& values, const Init& init, const Philox& random, int64_t from) {
  if (init.deviation == 0) {
    Tensor v = values;
    v.fill(init.constant);
    return;
  }
  with_floating(values.dtype(), "init", [&](auto t) {
    using T = decltype(t);
    T* const p = values.data<T>();
    cpu::split(values.numel(), 4096, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i)
        p[i] = T(static_cast<Accumulate<T>>(random.normal(static_cast<uint64_t>(from + i)) * init.deviation));
    });
  });
}

}  // namespace

Var Module::forward(const Var&) { throw Error("[module] '" + full_name() + "' has no forward with one input"); }

Var Module::operator()(const Var& x) {
  return call([this](const Var& in) { return forward(in); }, x);
}

Var Module::call(Inner f, const Var& x) {
  for (const auto& w : wraps_) f = [&w, inner = std::move(f)](const Var& in) { return w(inner, in); };
  return f(x);
}

void Module::drop_packs() {
  for (const auto& c : children_) c->drop_packs();
}

Var& Module::param(std::string name, const Shape& shape, Init init) {
  for (int64_t d : shape)
    if (d <= 0)
      throw Error("[module] parameter '" + name + "' has shape " + shape.str() + "; every dim must be positive");
  return parameters_.emplace_back(Parameter{std::move(name), Var(Tensor::meta(shape, DType::float32), true), init}).var;
}

StepInfo Module::step() const {
  const StepInfo at = parent_ ? parent_->step() : step_;
  return adjust_ ? adjust_(at) : at;
}

void Module::cut(const Var& parameter, int dim, std::vector<Cut::Run> runs) {
  const auto found =
      std::find_if(parameters_.begin(), parameters_.end(), [&](const Parameter& p) { return &p.var == &parameter; });
  if (found == parameters_.end()) throw Error("[module] '" + full_name() + "' has no such parameter to cut");
  const std::string name = "'" + full_name() + "." + found->name + "'";
  if (found->var.value().device() != Device::meta || !found->cut.is_whole())
    throw Error("[module] " + name + " cannot be cut: it has memory, or was cut before");
  Cut cut{found->var.shape(), dim, std::move(runs)};
  for (const Cut::Run& run : cut.runs)
    if (run.begin < 0 || run.size < 1 || run.begin + run.size > cut.whole[dim])
      throw Error("[module] " + name + " has " + std::to_string(cut.whole[dim]) + " along dim " + std::to_string(dim) +
                  "; it cannot be cut to " + std::to_string(run.size) + " from " + std::to_string(run.begin));
  found->var = Var(Tensor::meta(cut.local(), found->var.dtype()), true);
  found->cut = std::move(cut);
}

void Module::adopt(std::string name, std::unique_ptr<Module> module) {
  module->name_ = std::move(name);
  module->parent_ = this;
  children_.push_back(std::move(module));
}

std::string Module::full_name() const {
  if (!parent_) return name_;
  const std::string above = parent_->full_name();
  return above.empty() ? name_ : above + "." + name_;
}

void Module::collect(const std::string& prefix, std::vector<Named>& out) {
  if (!here_) return;
  for (Parameter& p : parameters_) out.push_back({prefix + p.name, &p});
  for (const auto& c : children_) c->collect(prefix + c->name_ + ".", out);
}

std::vector<Module::Named> Module::parameters() {
  std::vector<Named> out;
  const std::string name = full_name();
  collect(name.empty() ? "" : name + ".", out);
  return out;
}

int64_t Module::parameter_count() {
  int64_t n = 0;
  for (const Named& p : parameters()) n += p.parameter->var.value().numel();
  return n;
}

void Module::collect_units(const std::string& prefix, std::vector<Group>& out) {
  if (!here_) return;
  if (is_unit_ || out.empty()) out.push_back({this, {}});
  const size_t own = out.size() - 1;
  for (Parameter& p : parameters_) out[own].members.push_back({prefix + p.name, &p});
  for (const auto& c : children_) {
    if (c->is_unit_) {
      c->collect_units(prefix + c->name_ + ".", out);
    } else {
      std::vector<Named> below;
      c->collect(prefix + c->name_ + ".", below);
      out[own].members.insert(out[own].members.end(), below.begin(), below.end());
    }
  }
}

std::vector<Module::Unit> Module::layout() {
  std::vector<Group> groups;
  collect_units("", groups);
  std::vector<Unit> out;
  for (const Group& group : groups) {
    if (group.members.empty()) continue;
    const std::string name = group.module->full_name();
    Unit unit{.name = name.empty() ? "model" : name, .module = group.module};
    for (const Named& p : group.members) {
      const Shape& shape = p.parameter->var.shape();
      unit.slots.push_back({p.name, unit.size, shape, shape.rank() >= 2, p.parameter->cut, p.parameter->alias});
      unit.parameters.push_back(p.parameter);
      unit.size = (unit.size + shape.numel() + kSlotAlignment - 1) / kSlotAlignment * kSlotAlignment;
    }
    out.push_back(std::move(unit));
  }
  return out;
}

void initialise(const Module::Unit& unit, const Tensor& values, int64_t begin, uint64_t seed) {
  // A GPU gets what was drawn on the host: the C library's sine and logarithm, so the same bits everywhere.
  const bool here = values.device() == Device::cpu;
  Tensor all =
      here ? values : Tensor::empty(values.shape(), values.dtype(), values.arena()->host(), Category::workspace);
  all.fill(0);
  const int64_t end = begin + values.numel();
  for (size_t i = 0; i < unit.slots.size(); ++i) {
    const Slot& slot = unit.slots[i];
    const int64_t from = std::max(begin, slot.begin), to = std::min(end, slot.begin + slot.shape.numel());
    const Parameter& parameter = *unit.parameters[i];
    const Philox random = Philox::named(seed, parameter.alias.empty() ? slot.name : parameter.alias);
    for_each_run(slot.cut, slot.shape, from - slot.begin, to - slot.begin,
                 [&](int64_t at, int64_t whole, int64_t count) {
                   initialise_elements(all.narrow(0, slot.begin + at - begin, count), parameter.init, random, whole);
                 });
  }
  if (!here) Tensor(values).copy_from(all);
}

void bind_values(const Module::Unit& unit, const Tensor& values) {
  for (size_t i = 0; i < unit.slots.size(); ++i) {
    const Slot& slot = unit.slots[i];
    unit.parameters[i]->var.set_value(values.narrow(0, slot.begin, slot.shape.numel()).reshape(slot.shape));
  }
}

void bind_gradients(const Module::Unit& unit, const Tensor& grads) {
  for (size_t i = 0; i < unit.slots.size(); ++i) {
    const Slot& slot = unit.slots[i];
    unit.parameters[i]->var.set_grad_buffer(grads.narrow(0, slot.begin, slot.shape.numel()).reshape(slot.shape));
  }
}

std::vector<FlatUnit>& Module::materialize(uint64_t seed, const ArenaPtr& arena, DType dtype, DType grad_dtype) {
  if (!units_.empty()) throw Error("[module] materialize() called twice");
  for (const Unit& unit : layout()) {
    FlatUnit flat{unit.name, Tensor::empty({unit.size}, dtype, arena, Category::parameters),
                  Tensor::empty({unit.size}, grad_dtype, arena, Category::gradients), unit.slots};
    initialise(unit, flat.values, 0, seed);
    flat.grads.fill(0);
    bind_values(unit, flat.values);
    bind_gradients(unit, flat.grads);
    units_.push_back(std::move(flat));
  }
  return units_;
}

void Module::clear_gradients() {
  for (const Named& p : parameters()) p.parameter->var.clear_grad();
}

void Module::settle_gradients() {
  for (const Named& p : parameters()) p.parameter->var.settle_grad();
}

}  // namespace tessera
