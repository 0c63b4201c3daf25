// SGD: the update of one element, and the loop over the units.
#include "optim/sgd.h"

#include <type_traits>

#include "optim/segments.h"
#include "tensor/math.h"

namespace tessera {
namespace {

template <class V, class G, class W>
struct Buffers {
  V* values;
  const G* grads;
  W *master, *momentum;
};

template <class W>
struct Coefficients {
  W grad_scale, momentum, decay, lr;
};

template <bool kMomentum, class V, class G, class W>
void update(const Buffers<V, G, W>& b, const Coefficients<W>& c, int64_t begin, int64_t end, bool decay) {
  const W scale = c.grad_scale, momentum = c.momentum, coupled = decay ? c.decay : W(0), step = -c.lr;
  V* const values = b.values;
  const G* const grads = b.grads;
  W *const master = b.master, *const buffer = b.momentum;
#pragma GCC ivdep
  for (int64_t i = begin; i < end; ++i) {
    const W p = master[i];
    W g = math::fma(coupled, p, scale * static_cast<W>(grads[i]));
    if constexpr (kMomentum) {
      g = math::fma(momentum, buffer[i], g);
      buffer[i] = g;
    }
    const W q = math::fma(step, g, p);
    master[i] = q;
    if constexpr (std::is_same_v<V, bfloat16>) values[i] = bfloat16(q);
  }
}

}  // namespace

Sgd::Sgd(std::vector<FlatUnit> units, const OptimizerOptions& options)
    : Optimizer(std::move(units), options.state_arena), options_(options) {
  for (const FlatUnit& unit : this->units()) {
    const Tensor momentum = options.momentum != 0 ? add_state(unit, "momentum") : Tensor();
    states_.push_back({momentum, add_master(unit)});
  }
}

void Sgd::step(double lr, double grad_scale) {
  ++steps_;
  for (size_t u = 0; u < states_.size(); ++u) {
    const FlatUnit& unit = units()[u];
    const State& state = states_[u];
    with_unit_types(unit, [&](auto value, auto grad) {
      using V = decltype(value);
      using G = decltype(grad);
      using W = typename StateOf<V>::type;
      const Coefficients<W> c{static_cast<W>(grad_scale), static_cast<W>(options_.momentum),
                              static_cast<W>(options_.weight_decay), static_cast<W>(lr)};
      const Buffers<V, G, W> b{unit.values.data<V>(), unit.grads.data<G>(), state.master.data<W>(),
                               state.momentum.defined() ? state.momentum.data<W>() : nullptr};
      if (state.momentum.defined())
        for_each_segment(unit, [&](int64_t begin, int64_t end, bool decay) { update<true>(b, c, begin, end, decay); });
      else
        for_each_segment(unit, [&](int64_t begin, int64_t end, bool decay) { update<false>(b, c, begin, end, decay); });
    });
    ++unit.values.storage()->version;
  }
}

}  // namespace tessera
