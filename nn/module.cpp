// Trees of parameters and their layout in units.
#include "nn/module.h"

#include <algorithm>
#include <cstdint>
#include <memory>
#include <string>
#include <tuple>
#include <vector>

#include "autograd/parameter_memory.h"
#include "nn/quantize/packed.h"
#include "nn/units.h"

namespace tessera {

namespace {
constexpr int64_t kSlotAlignment = 16;  // elements: 64-byte alignment in float32
}

Var Module::forward(const Var&) {
  throw Error("[module] '" + full_name() + "' does not implement forward() for a single input");
}

Var Module::operator()(const Var& x) {
  return call([this](const Var& in) { return forward(in); }, x);
}

Var Module::call(Inner f, const Var& x) {
  require_object(f ? this : nullptr, "[call] inner");
  for (const auto& w : wraps_) f = [&w, inner = std::move(f)](const Var& in) { return w(inner, in); };
  return f(x);
}

void Module::drop_packs() {
  for (const auto& c : children_) c->drop_packs();
}

Var& Module::param(std::string name, const Shape& shape, Init init) {
  for (int64_t d : shape)
    if (d <= 0)
      throw Error("[module] parameter '" + name + "' has shape " + shape.str() + "; expected positive dimensions");
  Var var(Tensor::meta(shape, DType::float32), true);
  return parameters_
      .emplace_back(Parameter{.name = std::move(name),
                              .full_shape = shape,
                              .init = init,
                              .decays = shape.ndim() >= 2,
                              .var = std::move(var)})
      .var;
}

Parameter& Module::parameter(const Var& var) {
  const auto found =
      std::find_if(parameters_.begin(), parameters_.end(), [&](const Parameter& p) { return &p.var == &var; });
  if (found == parameters_.end()) throw Error("[module] '" + full_name() + "' does not own this parameter");
  return *found;
}

StepInfo Module::step() const {
  const StepInfo at = parent_ ? parent_->step() : step_;
  return adjust_ ? adjust_(at) : at;
}

void Module::shard(const Var& var, ShardSpec spec) {
  Parameter& p = parameter(var);
  if (p.var.value().device() != Device::meta || !p.shard.is_replicated())
    throw Error("[module] '" + p.name + "' cannot be sharded: it is already materialized or sharded");
  for (const ShardSpec::Run& run : spec.runs)
    if (run.begin < 0 || run.size < 1 || run.size > p.full_shape[spec.dim] - run.begin)
      throw Error("[module] '" + p.name + "' has " + std::to_string(p.full_shape[spec.dim]) + " along dim " +
                  std::to_string(spec.dim) + "; shard out of range: " + std::to_string(run.size) +
                  " elements starting at " + std::to_string(run.begin));
  p.shard = std::move(spec);
  if (p.packed) cut(*p.packed, p);
  p.var = Var(Tensor::meta(p.local(), p.var.dtype()), p.trainable);
}

void Module::quantize(const Var& var, const Packing& packing) {
  Parameter& p = parameter(var);
  if (p.var.value().device() != Device::meta || !p.shard.is_replicated())
    throw Error("[module] '" + p.name + "' cannot be quantized: it is already materialized or sharded");
  check(packing, p.name);
  p.packed = make_packed(packing);
  p.trainable = false;
  p.var = Var(Tensor::meta(p.full_shape, p.var.dtype()));
}

void Module::freeze() {
  for (Parameter* p : parameters()) {
    if (p->var.value().device() != Device::meta)
      throw Error("[module] '" + p->name + "' cannot be frozen: it is already materialized");
    p->trainable = false;
    p->var = Var(Tensor::meta(p->local(), p->var.dtype()));
  }
}

void Module::adopt(std::string name, std::unique_ptr<Module> module) {
  require_object(module.get(), "[module] child");
  module->name_ = std::move(name);
  module->parent_ = this;
  module->rename(module->full_name() + ".");  // with the parent's name, if known
  children_.push_back(std::move(module));
}

void Module::rename(const std::string& prefix) {
  for (Parameter& p : parameters_) {
    p.name.insert(0, prefix);
    if (p.is_tied()) p.tie.insert(0, prefix);
  }
  for (const auto& c : children_) c->rename(prefix);
}

std::string Module::full_name() const {
  if (!parent_) return name_;
  const std::string above = parent_->full_name();
  return above.empty() ? name_ : above + "." + name_;
}

bool Module::contains(const Module& module) const {
  const Module* at = &module;
  while (at && at != this) at = at->parent_;
  return at == this;
}

void Module::collect(std::vector<Parameter*>& out) {
  if (!here_) return;
  for (Parameter& p : parameters_) out.push_back(&p);
  for (const auto& c : children_) c->collect(out);
}

std::vector<Parameter*> Module::parameters() {
  std::vector<Parameter*> out;
  collect(out);
  return out;
}

int64_t Module::parameter_count() {
  int64_t n = 0;
  for (const Parameter* p : parameters()) n += p->var.value().numel();
  return n;
}

void Module::collect_units(std::vector<Group>& out) {
  if (!here_) return;
  out.push_back({this, {}});
  collect_members(out, out.size() - 1);
}

// Collects the parameters of one unit, out[unit], and of the units below it.
void Module::collect_members(std::vector<Group>& out, size_t unit) {
  if (!here_) return;
  for (Parameter& p : parameters_) out[unit].members.push_back(&p);
  for (const auto& c : children_)
    if (c->is_unit_)
      c->collect_units(out);
    else
      c->collect_members(out, unit);
}

std::vector<Module::Unit> Module::layout() {
  std::vector<Group> groups;
  collect_units(groups);
  std::vector<Unit> out;
  for (const Group& group : groups)
    for (const auto& [kind, trainable, packed, matrices] : {std::tuple{"", true, false, false},
                                                            {" (matrices)", true, false, true},
                                                            {" (frozen)", false, false, false},
                                                            {" (four bits)", false, true, false}}) {
      const std::string name = group.module->full_name();
      Unit unit{.name = (name.empty() ? "model" : name) + kind,
                .module = group.module,
                .trainable = trainable,
                .packed = packed,
                .matrices = matrices};
      for (Parameter* p : group.members) {
        if (p->trainable != trainable || (p->packed != nullptr) != packed) continue;
        if (p->trainable && p->full_matrix_update != matrices) continue;
        unit.slots.push_back({p, unit.size, p->stored_here()});
        unit.size = (unit.slots.back().end() + kSlotAlignment - 1) / kSlotAlignment * kSlotAlignment;
      }
      if (!unit.slots.empty()) out.push_back(std::move(unit));
    }
  return out;
}

std::vector<FlatUnit>& Module::materialize(uint64_t seed, const ArenaPtr& arena, DType dtype, DType grad_dtype) {
  if (!units_.empty()) throw Error("[module] materialize() called twice");
  for (const Unit& unit : layout()) units_.push_back(tessera::make_unit(unit, arena, dtype, grad_dtype, seed));
  return units_;
}

void Module::clear_gradients() {
  for (Parameter* p : parameters())
    if (p->trainable) p->var.clear_grad();
}

void Module::zero_missing_gradients() {
  for (Parameter* p : parameters())
    if (p->trainable) zero_missing_grad(p->var);
}

}  // namespace tessera
