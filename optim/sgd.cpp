// SGD: the loops over the units.
#include "optim/sgd.h"

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
  W *master, *momentum;
};

template <bool kMomentum, class V, class G, class W>
void update_range(const Buffers<V, G, W>& b, const SgdStep<W>& c, int64_t begin, int64_t end) {
  V* const values = b.values;
  const G* const grads = b.grads;
  W *const master = b.master, *const buffer = b.momentum;
#pragma GCC ivdep
  for (int64_t i = begin; i < end; ++i) {
    SgdElement<W> e{master[i], W(0)};
    if constexpr (kMomentum) e.momentum = buffer[i];
    e = updated<kMomentum>(c, e, static_cast<W>(grads[i]));
    if constexpr (kMomentum) buffer[i] = e.momentum;
    master[i] = e.p;
    if constexpr (std::is_same_v<V, bfloat16>) values[i] = bfloat16(e.p);
  }
}

template <class V, class G, class W>
void update_on_cpu(const FlatUnit& unit, const SgdState& state, const SgdStep<W>& step) {
  const bool has_momentum = state.momentum.defined();
  const Buffers<V, G, W> b{unit.values.data<V>(), unit.grads.data<G>(), state.master.data<W>(),
                           has_momentum ? state.momentum.data<W>() : nullptr};
  for_each_segment(unit, [&](int64_t begin, int64_t end, const Slot& slot) {
    const SgdStep<W> c = step.of_slot(slot.parameter->decays);
    has_momentum ? update_range<true>(b, c, begin, end) : update_range<false>(b, c, begin, end);
  });
}

// Values and momentum all in bfloat16.
template <bool kMomentum, class G>
void update_rounded(const FlatUnit& unit, const SgdState& state, const SgdStep<float>& step,
                    const std::vector<Philox>& rounding, int64_t t) {
  bfloat16 *const values = unit.values.data<bfloat16>(), *const buffer =
                                                             kMomentum ? state.momentum.data<bfloat16>() : nullptr;
  const G* const grads = unit.grads.data<G>();
  for_each_segment(unit, [&](int64_t begin, int64_t end, const Slot& slot) {
    const SgdStep<float> c = step.of_slot(slot.parameter->decays);
    const auto at = [&](int64_t first, int64_t count, const RoundingBits& bits) {
      alignas(64) float p[kRoundedAtOnce], momentum[kRoundedAtOnce];
      for (int64_t i = 0; i < count; ++i) {
        SgdElement<float> e{values[first + i], 0};
        if constexpr (kMomentum) e.momentum = buffer[first + i];
        e = updated<kMomentum>(c, e, static_cast<float>(grads[first + i]));
        p[i] = e.p;
        momentum[i] = e.momentum;
      }
      bits.round(values + first, p, count, 0);
      if constexpr (kMomentum) bits.round(buffer + first, momentum, count, 1);
    };
    for_each_rounded(slot, rounding[static_cast<size_t>(&slot - unit.slots.data())], t, begin, end, at);
  });
}

}  // namespace

Sgd::Sgd(std::vector<FlatUnit> units, const OptimizerOptions& options) : Optimizer(std::move(units), options) {
  for (const FlatUnit& unit : this->units()) {
    const Tensor momentum = options.momentum != 0 ? add_state(unit, "momentum") : Tensor();
    states_.push_back({momentum, add_master(unit)});
    rounding_.push_back(rounds(unit) ? rounding_streams(unit, options.seed) : std::vector<Philox>());
  }
}

UpdateNumbers Sgd::next(double lr) const { return {.lr = lr}; }

void Sgd::update(const UpdateNumbers& now, const UpdateNumbers* on_gpu) {
  for (size_t u = 0; u < states_.size(); ++u) {
    const FlatUnit& unit = units()[u];
    with_unit_types(unit, [&](auto value, auto grad) {
      using V = decltype(value);
      using G = decltype(grad);
      using W = Accumulate<V>;
      const auto c = SgdStep<W>::of(options()).at(now);
      if constexpr (std::is_same_v<V, bfloat16>)
        if (!rounding_[u].empty())
          return states_[u].momentum.defined() ? update_rounded<true, G>(unit, states_[u], c, rounding_[u], steps())
                                               : update_rounded<false, G>(unit, states_[u], c, rounding_[u], steps());
      on_device(
          unit.grads.device(), [&] { update_on_cpu<V, G>(unit, states_[u], c); },
          [&] { cuda::sgd(unit, states_[u], c, on_gpu); });
    });
  }
}

}  // namespace tessera
