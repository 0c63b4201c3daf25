// Parameter trees and their materialization.
#include "nn/module.h"

#include <algorithm>
#include <array>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <tuple>
#include <vector>

#include "autograd/parameter_memory.h"
#include "nn/quantize/packed.h"
#include "tensor/cpu/vectorize.h"
#include "tensor/random.h"

namespace tessera {
namespace {

constexpr int64_t kSlotAlignment = 16;  // elements: 64-byte alignment in float32

// `values` are the elements from index `from` on.
void initialise_elements(const Tensor& values, const Init& init, const Philox& random, int64_t from) {
  if (init.deviation == 0) {
    Tensor v = values;
    v.fill(init.constant);
    return;
  }
  with_floating(values.dtype(), "init", [&]<class T>(T) {
    T* const p = values.data<T>();
    cpu::split(values.numel(), 4096, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i)
        p[i] = T(static_cast<Accumulate<T>>(random.normal(static_cast<uint64_t>(from + i)) * init.deviation));
    });
  });
}

// Initializes bytes [begin, begin + values.numel()) of the local shard of a 4-bit matrix.
void initialise_bytes(const Tensor& values, const Parameter& p, const Philox& random, int64_t begin) {
  const std::vector<std::byte> full = quantize(p.packed->packing, [&](int64_t from, std::span<float> to) {
    cpu::split(std::ssize(to), 4096, [&](int64_t first, int64_t last) {
      for (int64_t i = first; i < last; ++i)
        to[static_cast<size_t>(i)] = static_cast<float>(
            p.init.deviation == 0 ? p.init.constant
                                  : random.normal(static_cast<uint64_t>(from + i)) * p.init.deviation);
    });
  });
  for_each_run(p, begin, begin + values.numel(), [&](int64_t at, int64_t from, int64_t count) {
    std::copy_n(full.begin() + from, count, values.raw() + (at - begin));
  });
}

}  // namespace

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
      .emplace_back(Parameter{
          .name = std::move(name), .whole = shape, .init = init, .decays = shape.ndim() >= 2, .var = std::move(var)})
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
    if (run.begin < 0 || run.size < 1 || run.size > p.whole[spec.dim] - run.begin)
      throw Error("[module] '" + p.name + "' has " + std::to_string(p.whole[spec.dim]) + " along dim " +
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
  p.var = Var(Tensor::meta(p.whole, p.var.dtype()));
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

void initialise(const Module::Unit& unit, const Tensor& values, int64_t begin, uint64_t seed) {
  if (cpu::DryRun::here()) return;
  // GPU values are generated on the host, whose C library gives bitwise identical sines and logarithms everywhere.
  const bool here = values.device() == Device::cpu;
  Tensor all =
      here ? values : Tensor::empty(values.shape(), values.dtype(), values.arena()->host(), Category::workspace);
  all.fill(0);
  const int64_t end = begin + values.numel();
  for (const Slot& slot : unit.slots) {
    const int64_t from = std::max(begin, slot.begin), to = std::min(end, slot.end());
    const Philox random = Philox::named(seed, slot.parameter->source());
    if (unit.packed) {
      if (from < to)
        initialise_bytes(all.narrow(0, from - begin, to - from), *slot.parameter, random, from - slot.begin);
      continue;
    }
    for_each_run(*slot.parameter, from - slot.begin, to - slot.begin, [&](int64_t at, int64_t full, int64_t count) {
      initialise_elements(all.narrow(0, slot.begin + at - begin, count), slot.parameter->init, random, full);
    });
  }
  if (!here) Tensor(values).copy_from(all);
}

namespace {
Tensor view(const Tensor& buffer, const Slot& slot) {
  return buffer.narrow(0, slot.begin, slot.size).reshape(slot.parameter->local());
}
}  // namespace

void bind_values(const Module::Unit& unit, const Tensor& values) {
  for (const Slot& slot : unit.slots)
    if (unit.packed)
      slot.parameter->packed->bytes = values.narrow(0, slot.begin, slot.size);
    else
      slot.parameter->var.set_value(view(values, slot));
}

void drop_values(const Module::Unit& unit, DType dtype) {
  for (const Slot& slot : unit.slots)
    if (unit.packed)
      slot.parameter->packed->bytes = Tensor();
    else
      slot.parameter->var.set_value(Tensor::meta(slot.parameter->var.shape(), dtype));
}

void bind_gradients(const Module::Unit& unit, const Tensor& grads) {
  for (const Slot& slot : unit.slots) set_grad_buffer(slot.parameter->var, view(grads, slot));
}

FlatUnit make_flat(const Module::Unit& unit, Tensor values, Tensor grads, uint64_t seed) {
  initialise(unit, values, 0, seed);
  bind_values(unit, values);
  if (!unit.trainable) return {unit.name, std::move(values), {}, unit.slots};
  grads.fill(0);
  bind_gradients(unit, grads);
  return {unit.name, std::move(values), std::move(grads), unit.slots};
}

FlatUnit make_unit(const Module::Unit& unit, const ArenaPtr& arena, DType dtype, DType grad_dtype, uint64_t seed) {
  const Tensor values = Tensor::empty({unit.size}, unit.dtype(dtype), arena, Category::parameters);
  if (!unit.trainable) return make_flat(unit, values, {}, seed);
  return make_flat(unit, values, Tensor::empty({unit.size}, grad_dtype, arena, Category::gradients), seed);
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

Shape ShardSpec::slice_unit(Shape full) const {
  if (is_replicated()) return full;
  full[dim] = 0;
  for (const Run& run : runs) full[dim] += run.size;
  return full;
}

Shape Parameter::local() const { return shard.slice_unit(whole); }
Shape Parameter::stored() const { return packed ? packed->stored() : whole; }
const ShardSpec& Parameter::stored_shard() const { return packed ? packed->shard : shard; }
int64_t Parameter::stored_here() const {
  const int64_t elements = local().numel();
  return packed ? packed->packing.bytes(elements) : elements;
}

Documents find_documents(const Tensor& ids_any, int32_t end) {
  const Tensor ids = ids_any.contiguous();
  if (ids.ndim() != 2) throw Error("[documents] ids are " + ids.describe() + "; expected int32 (B, T)");
  Documents made{ids.make(ids.shape()), ids.make(ids.shape())};
  const int64_t tokens = ids.dim(1);
  for (int64_t b = 0; b < ids.dim(0); ++b) {
    const int32_t* const id = ids.data<int32_t>() + b * tokens;
    int32_t *const starts = made.starts.data<int32_t>() + b * tokens, *const positions =
                                                                          made.positions.data<int32_t>() + b * tokens;
    int32_t start = 0;
    for (int32_t t = 0; t < tokens; ++t) {
      if (t > 0 && id[t - 1] == end) start = t;
      starts[t] = start;
      positions[t] = t - start;
    }
  }
  return made;
}

Documents documents_from(const Tensor& starts) {
  Documents made{starts, starts.clone()};
  for (int64_t i = 0; i < starts.numel(); ++i)
    made.positions.data<int32_t>()[i] =
        std::max(static_cast<int32_t>(i % starts.dim(1)) - starts.data<int32_t>()[i], 0);  // padding: 0
  return made;
}

}  // namespace tessera
