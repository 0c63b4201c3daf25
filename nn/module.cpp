// Trees of parameters, and how they get their memory.
#include "nn/module.h"

#include "tensor/cpu/vectorize.h"
#include "tensor/ops/elementwise.h"
#include "tensor/random.h"

namespace tessera {
namespace {

constexpr int64_t kSlotAlignment = 16;  // elements: a slot starts on a 64-byte line in float32

// Element i is Philox::named(seed, name).normal(i) times the deviation, whatever the layout.
void initialise(const Tensor& value, const Init& init, uint64_t seed, const std::string& name) {
  if (init.deviation == 0) {
    Tensor v = value;
    v.fill(init.constant);
    return;
  }
  const Philox random = Philox::named(seed, name);
  with_floating(value.dtype(), "init", [&](auto t) {
    using T = decltype(t);
    T* const p = value.data<T>();
    cpu::split(value.numel(), 4096, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i)
        p[i] = T(static_cast<Accumulate<T>>(random.normal(static_cast<uint64_t>(i)) * init.deviation));
    });
  });
}

}  // namespace

Var Module::forward(const Var&) { throw Error("[module] '" + full_name() + "' has no forward with one input"); }

Var Module::operator()(const Var& x) {
  Inner call = [this](const Var& in) { return forward(in); };
  for (const auto& w : wraps_) call = [&w, inner = std::move(call)](const Var& in) { return w(inner, in); };
  return call(x);
}

Var& Module::param(std::string name, const Shape& shape, Init init) {
  for (int64_t d : shape)
    if (d <= 0)
      throw Error("[module] parameter '" + name + "' has shape " + shape.str() + "; every dim must be positive");
  return parameters_.emplace_back(Parameter{std::move(name), Var(Tensor::meta(shape, DType::float32), true), init}).var;
}

Var& Module::tie(Var& source) {
  return ties_.emplace_back(Tie{&source, Var(Tensor::meta(source.shape(), DType::float32), true)}).use;
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

void Module::collect_units(const std::string& prefix, std::vector<std::pair<std::string, std::vector<Named>>>& out) {
  if (is_unit_ || out.empty()) out.emplace_back(full_name(), std::vector<Named>{});
  const size_t own = out.size() - 1;
  for (Parameter& p : parameters_) out[own].second.push_back({prefix + p.name, &p});
  for (const auto& c : children_) {
    if (c->is_unit_) {
      c->collect_units(prefix + c->name_ + ".", out);
    } else {
      std::vector<Named> below;
      c->collect(prefix + c->name_ + ".", below);
      out[own].second.insert(out[own].second.end(), below.begin(), below.end());
    }
  }
}

void Module::for_each_tie(const std::function<void(Tie&)>& f) {
  for (Tie& t : ties_) f(t);
  for (const auto& c : children_) c->for_each_tie(f);
}

std::vector<FlatUnit>& Module::materialize(uint64_t seed, const ArenaPtr& arena, DType dtype, DType grad_dtype) {
  if (!units_.empty()) throw Error("[module] materialize() called twice");
  std::vector<std::pair<std::string, std::vector<Named>>> groups;
  collect_units("", groups);
  for (auto& [unit_name, members] : groups) {
    if (members.empty()) continue;
    FlatUnit unit;
    unit.name = unit_name.empty() ? "model" : unit_name;
    int64_t size = 0;
    for (const Named& p : members) {
      const Shape& shape = p.parameter->var.shape();
      unit.slots.push_back({p.name, size, shape, shape.rank() >= 2});
      size = (size + shape.numel() + kSlotAlignment - 1) / kSlotAlignment * kSlotAlignment;
    }
    unit.values = Tensor::empty({size}, dtype, arena, Category::parameters);
    unit.grads = Tensor::empty({size}, grad_dtype, arena, Category::gradients);
    unit.values.fill(0);
    unit.grads.fill(0);
    for (size_t i = 0; i < members.size(); ++i) {
      const Slot& slot = unit.slots[i];
      const Tensor value = unit.values.narrow(0, slot.begin, slot.shape.numel()).reshape(slot.shape);
      Var& var = members[i].parameter->var;
      initialise(value, members[i].parameter->init, seed, slot.name);
      var.set_value(value);
      var.set_grad_buffer(unit.grads.narrow(0, slot.begin, slot.shape.numel()).reshape(slot.shape));
    }
    units_.push_back(std::move(unit));
  }
  for_each_tie([&](Tie& t) {
    t.use.set_value(t.source->value());
    t.use.set_grad_buffer(Tensor::empty(t.source->shape(), grad_dtype, arena, Category::gradients));
  });
  return units_;
}

void Module::clear_gradients() {
  for (const Named& p : parameters()) p.parameter->var.clear_grad();
  for_each_tie([](Tie& t) { t.use.clear_grad(); });
}

void Module::settle_gradients() {
  for (const Named& p : parameters()) p.parameter->var.settle_grad();
  for_each_tie([](Tie& t) {
    if (!t.use.grad().defined()) return;
    Tensor total = t.source->grad();
    add_(total, t.use.grad());
    t.use.clear_grad();
  });
}

}  // namespace tessera
