// Adam and AdamW: the loops over the units.
#include "optim/adam.h"

#include <cmath>
#include <type_traits>

#include "optim/cuda/updates.h"
#include "optim/rounding.h"
#include "optim/segments.h"

namespace tessera {
namespace {

template <class V, class G, class W>
struct Buffers {
  V* values;
  const G* grads;
  W *master, *m, *v;
};

template <class V, class G, class W>
void update_range(const Buffers<V, G, W>& b, const AdamStep<W>& c, int64_t begin, int64_t end) {
  V* const values = b.values;
  const G* const grads = b.grads;
  W *const master = b.master, *const ms = b.m, *const vs = b.v;
#pragma GCC ivdep
  for (int64_t i = begin; i < end; ++i) {
    const AdamElement<W> e = updated(c, AdamElement<W>{master[i], ms[i], vs[i]}, static_cast<W>(grads[i]));
    ms[i] = e.m;
    vs[i] = e.v;
    master[i] = e.p;
    if constexpr (std::is_same_v<V, bfloat16>) values[i] = bfloat16(e.p);
  }
}

template <class V, class G, class W>
void update_on_cpu(const FlatUnit& unit, const AdamState& state, const AdamStep<W>& step) {
  const Buffers<V, G, W> b{unit.values.data<V>(), unit.grads.data<G>(), state.master.data<W>(), state.m.data<W>(),
                           state.v.data<W>()};
  for_each_segment(unit, [&](int64_t begin, int64_t end, const Slot& slot) {
    update_range(b, step.of_slot(slot.parameter->decays), begin, end);
  });
}

// Values, m and v all in bfloat16.
template <class G>
void update_rounded(const FlatUnit& unit, const AdamState& state, const AdamStep<float>& step,
                    const std::vector<Philox>& rounding, int64_t t) {
  bfloat16 *const values = unit.values.data<bfloat16>(), *const ms = state.m.data<bfloat16>(),
                  *const vs = state.v.data<bfloat16>();
  const G* const grads = unit.grads.data<G>();
  for_each_segment(unit, [&](int64_t begin, int64_t end, const Slot& slot) {
    const AdamStep<float> c = step.of_slot(slot.parameter->decays);
    const auto at = [&](int64_t first, int64_t count, const RoundingBits& bits) {
      alignas(64) float p[kRoundedAtOnce], m[kRoundedAtOnce], v[kRoundedAtOnce];
      for (int64_t i = 0; i < count; ++i) {
        const int64_t j = first + i;
        const AdamElement<float> e =
            updated(c, AdamElement<float>{values[j], ms[j], vs[j]}, static_cast<float>(grads[j]));
        p[i] = e.p;
        m[i] = e.m;
        v[i] = e.v;
      }
      bits.round(values + first, p, count, 0);
      bits.round(ms + first, m, count, 1);
      bits.round(vs + first, v, count, 2);
    };
    for_each_rounded(slot, rounding[static_cast<size_t>(&slot - unit.slots.data())], t, begin, end, at);
  });
}

}  // namespace

Adam::Adam(std::vector<FlatUnit> units, const OptimizerOptions& options, Decay decay)
    : Adam(std::move(units), options, decay, Stateless()) {
  for (const FlatUnit& unit : this->units()) add_moments(unit);
}

void Adam::add_moments(const FlatUnit& unit) {
  const Tensor m = add_state(unit, "m"), v = add_state(unit, "v");
  states_.push_back({m, v, add_master(unit)});
  rounding_.push_back(rounds(unit) ? rounding_streams(unit, options().seed) : std::vector<Philox>());
}

UpdateNumbers Adam::next(double lr) const {
  const auto t = static_cast<double>(steps() + 1);
  return {.lr = lr,
          .step_size = -lr / (1 - std::pow(options().beta1, t)),
          .root_scale = 1 / std::sqrt(1 - std::pow(options().beta2, t)),
          .keep = decay_ == Decay::decoupled ? 1 - lr * options().weight_decay : 1};
}

void Adam::update(const UpdateNumbers& now, const UpdateNumbers* on_gpu) {
  for (size_t u = 0; u < states_.size(); ++u) {
    const FlatUnit& unit = units()[u];
    if (!states_[u].m.defined()) continue;
    with_unit_types(unit, [&](auto value, auto grad) {
      using V = decltype(value);
      using G = decltype(grad);
      using W = Accumulate<V>;
      const auto c = AdamStep<W>::of(options(), decay_).at(now);
      if constexpr (std::is_same_v<V, bfloat16>)
        if (!rounding_[u].empty()) return update_rounded<G>(unit, states_[u], c, rounding_[u], steps());
      on_device(
          unit.grads.device(), [&] { update_on_cpu<V, G>(unit, states_[u], c); },
          [&] { cuda::adam(unit, states_[u], c, on_gpu); });
    });
  }
}

}  // namespace tessera
