// Optimizers: validation of units, state tensors, and the CPU loop shared by all rules.
#include "optim/optimizer.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <variant>
#include <vector>

#include "optim/muon.h"
#include "optim/rounding.h"
#include "tensor/cpu/vectorize.h"

namespace tessera {
namespace {

void check_unit(const FlatUnit& unit) {
  const Tensor &values = unit.values, &grads = unit.grads;
  if (!is_floating(values.dtype()) || values.ndim() != 1 || !values.is_contiguous())
    throw Error(fmt::format("[optimizer] values of {} are {}; expected a contiguous 1-D floating-point tensor",
                            unit.name, values.describe()));
  if (!is_floating(grads.dtype()) || grads.shape() != values.shape() || !grads.is_contiguous())
    throw Error(
        fmt::format("[optimizer] gradients of {} are {}; expected a contiguous floating-point tensor of shape {}",
                    unit.name, grads.describe(), values.shape().str()));
  if ((values.dtype() == DType::float64) != (grads.dtype() == DType::float64))
    throw Error(
        fmt::format("[optimizer] values of {} are {} and gradients {}; expected float64 for both or for neither",
                    unit.name, to_string(values.dtype()), to_string(grads.dtype())));
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
    throw Error(fmt::format("[optimizer] state is {}; expected float32 or bfloat16", to_string(o.state)));
  if (!(o.weight_decay >= 0))
    throw Error(fmt::format("[optimizer] weight_decay is {}; expected a number of at least 0", o.weight_decay));
}

// Runs f(begin, end, slot) on ranges that cover the unit's slots, clipped to its buffers, each within one slot,
// balanced over the threads.
template <class F>
void for_each_segment(const FlatUnit& unit, const F& f) {
  const int64_t n = unit.values.numel();
  const Slot* const first = unit.slots.data();
  const Slot* const last = first + unit.slots.size();
  cpu::split(n, cpu::kGrain, [&](int64_t from, int64_t to) {
    for (const Slot* slot = first; slot != last; ++slot) {
      const int64_t begin = std::max(from, slot->begin), end = std::min(to, slot->end());
      if (begin < end) f(begin, end, *slot);
    }
  });
}

// Accesses a few elements at a time: in place, or widened into a buffer for bfloat16, so that each rule has one loop
// for all dtypes.
template <class W>
class Elements {
 public:
  explicit Elements(const Tensor& t)
      : wide_(t.dtype() == DType::bfloat16 ? nullptr : t.data<W>()),
        narrow_(t.dtype() == DType::bfloat16 ? t.data<bfloat16>() : nullptr) {}

  // For bfloat16, n is at most kRoundedAtOnce, and the elements are valid until the next call.
  W* wide(int64_t at, int64_t n) {
    if (wide_ != nullptr) return wide_ + at;
    cpu::vectorized([to = buffer_, from = narrow_ + at, n] {
      for (int64_t i = 0; i < n; ++i) to[i] = static_cast<float>(from[i]);
    });
    return buffer_;
  }
  // For bfloat16: rounds x stochastically with the bits of `number`, or to nearest without bits.
  void store(const W* x, int64_t at, int64_t n, const RoundingBits* bits, int number) const {
    if (wide_ != nullptr) return;
    cpu::vectorized([to = narrow_ + at, x, n, bits, number] {
      if (bits != nullptr) return bits->round(to, x, n, number);
      for (int64_t i = 0; i < n; ++i) to[i] = bfloat16(static_cast<float>(x[i]));
    });
  }

 private:
  W* wide_;
  bfloat16* narrow_;
  alignas(64) W buffer_[kRoundedAtOnce];
};

template <class Rule, class W, size_t... K>
void update_on_cpu(const UnitUpdate& of, const UpdateConstants<W>& step, std::span<const Philox> rounding, int64_t t,
                   std::index_sequence<K...>) {
  for_each_segment(of.unit, [&](int64_t begin, int64_t end, const Slot& slot) {
    const auto c = step.of_slot(slot.parameter->decays);
    Elements<W> values(of.unit.values), grads(of.unit.grads), master(of.master);
    [[maybe_unused]] std::tuple states(Elements<W>(of.states[K])...);
    const auto update = [&](int64_t at, int64_t n, const RoundingBits* bits) {
      const std::tuple widened(std::get<K>(states).wide(at, n)...);
      W* const p = master.wide(at, n);
      cpu::vectorized([=, &c, g = grads.wide(at, n)] {
        const UpdateConstants<W> constants = c;
#pragma GCC ivdep
        for (int64_t i = 0; i < n; ++i) Rule::update(constants, g[i], p[i], std::get<K>(widened)[i]...);
      });
      values.store(p, at, n, bits, 0);
      (std::get<K>(states).store(std::get<K>(widened), at, n, bits, 1 + static_cast<int>(K)), ...);
    };
    if (!rounding.empty())
      return for_each_rounded(slot, rounding[static_cast<size_t>(&slot - of.unit.slots.data())], t, begin, end, update);
    const bool in_place = of.unit.values.dtype() != DType::bfloat16 && of.unit.grads.dtype() != DType::bfloat16;
    const int64_t max_count = in_place ? end - begin : kRoundedAtOnce;
    for (int64_t at = begin; at < end; at += max_count) update(at, std::min(max_count, end - at), nullptr);
  });
}

}  // namespace

Optimizer::Optimizer(OptimizerKind kind, std::vector<FlatUnit> units, const OptimizerOptions& options)
    : kind_(kind), units_(std::move(units)), options_(options) {
  check_options(options);
  for (const FlatUnit& unit : units_)
    for (const Slot& slot : unit.slots) require_object(slot.parameter, "[optimizer] parameter of a slot");
  std::erase_if(units_, [](const FlatUnit& unit) { return !unit.trainable(); });
  for (const FlatUnit& unit : units_) check_unit(unit);
  for (const FlatUnit& unit : units_)
    if (rounds(unit) && unit.grads.device() != Device::cpu)
      throw Error(fmt::format("[optimizer] state of {} is bfloat16 on a GPU; expected float32, or bfloat16 on the CPU",
                              unit.name));
  for (const FlatUnit& unit : units_) {
    const Tensor& values = unit.values;
    if (!unit.slots.empty()) models_.push_back(unit.slots[0].parameter->state);
    rules_.push_back(update_rule(kind, options.momentum, unit.matrices()));
    states_.emplace_back();
    for (const std::string_view name : state_names(rules_.back()))
      states_.back().push_back(add_state(unit, name, rounds(unit) ? DType::bfloat16 : accum_dtype(values.dtype())));
    const bool is_copy = values.dtype() == DType::bfloat16 && !rounds(unit);
    masters_.push_back(is_copy ? add_state(unit, "master", DType::float32) : values);
    if (is_copy) masters_.back().copy_from(masters_.back().device() == values.device() ? values : values.on_host());
    rounding_.push_back(rounds(unit) ? rounding_streams(unit, options.seed) : std::vector<Philox>());
  }
}

Tensor Optimizer::add_state(const FlatUnit& unit, std::string_view suffix, DType dtype) {
  const ArenaPtr& arena = options_.state_arena ? options_.state_arena : unit.grads.arena();
  Tensor t = Tensor::empty(unit.values.shape(), dtype, arena, Category::optimizer);
  t.fill(0);
  state_.push_back({unit.name + "." + std::string(suffix), t});
  return t;
}

const std::vector<NamedTensor>& Optimizer::state() const {
  if (options_.state_arena)
    for (const FlatUnit& unit : units_) wait_for(unit.grads.arena());
  return state_;
}

UpdateScalars Optimizer::next(double lr) const {
  const auto t = static_cast<double>(steps() + 1);
  const bool coupled = find_row(kind_).decay == Decay::coupled;
  return {.lr = lr,
          .step_size = -lr / (1 - std::pow(options_.beta1, t)),
          .root_scale = 1 / std::sqrt(1 - std::pow(options_.beta2, t)),
          .coupled = coupled ? options_.weight_decay : 0,
          .decay_factor = coupled ? 1 : 1 - lr * options_.weight_decay};
}

void Optimizer::step(double lr, double grad_scale) {
  if (!std::isfinite(lr)) throw Error("[optimizer] lr is " + std::to_string(lr) + "; expected a finite number");
  if (!std::isfinite(grad_scale)) reject("optimizer", "a finite `grad_scale`", std::to_string(grad_scale));
  for (const std::weak_ptr<ModuleState>& model : models_)
    if (const auto state = model.lock(); !state || state->awaits_gradients)
      reject("optimizer", "a model with gradients", state ? "one before reduce_gradients()" : "a destroyed one");
  UpdateScalars now = next(lr);
  now.grad_scale = grad_scale;
  update(now, nullptr);
  count_step();
}

void Optimizer::count_step() {
  ++steps_;
  for (const FlatUnit& unit : units_) ++unit.values.storage()->version;
}

void Optimizer::run(const UnitUpdate& of, std::span<const Philox> rounding, const UpdateScalars& now,
                    const UpdateScalars* on_gpu) const {
  const auto on_cpu = [&] {
    const auto with_rule = [&]<class Rule>(Rule) {
      with_wide(of.unit.grads, [&]<class W>(W) {
        const auto step = UpdateConstants<W>(options_).at(now);
        update_on_cpu<Rule>(of, step, rounding, steps_, std::make_index_sequence<Rule::kStates.size()>());
      });
    };
    std::visit(with_rule, of.rule);
  };
  on_device(of.unit.grads.device(), on_cpu, [&] { cuda::update(of, options_, now, on_gpu); });
}

// Muon updates matrices in two passes: the first writes `updates` in place of values, the second reads them as
// gradients.
void Optimizer::update(const UpdateScalars& now, const UpdateScalars* on_gpu) {
  std::vector<std::pair<size_t, FlatUnit>> matrices;
  for (size_t u = 0; u < units_.size(); ++u)
    if (std::holds_alternative<MuonMomentum>(rules_[u]))
      matrices.emplace_back(u, units_[u]);
    else
      run({rules_[u], units_[u], masters_[u], states_[u]}, rounding_[u], now, on_gpu);
  if (!find_row(kind_).updates_matrices) return;
  std::vector<Tensor> updates(units_.size());
  for (auto& [u, unit] : matrices) {
    unit.values = updates[u] = unit.grads.make(unit.values.shape(), states_[u][0].dtype(), Category::workspace);
    run({rules_[u], unit, updates[u], states_[u]}, {}, now, on_gpu);
  }
  options_.orthogonalise ? options_.orthogonalise(units_, updates) : make_updates(units_, updates);
  for (auto& [u, unit] : matrices) {
    unit.values = units_[u].values;
    unit.grads = updates[u];
    run({MuonMatrix(), unit, masters_[u], {}}, {}, now, on_gpu);
  }
}

}  // namespace tessera
