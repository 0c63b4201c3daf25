// Adam and AdamW: the update of one element, and the loop over the units.
#include "optim/adam.h"

#include <cmath>
#include <type_traits>

#include "optim/segments.h"
#include "tensor/math.h"

namespace tessera {
namespace {

// The constants of one step, rounded once to the type the update is computed in.
template <class W>
struct Coefficients {
  W grad_scale, beta1, rest1, beta2, rest2, step_size, root_scale, eps;
  W coupled, keep;  // of slots with decay; others have 0 and 1

  Coefficients(const OptimizerOptions& o, Decay decay, double t, double lr, double scale)
      : grad_scale(static_cast<W>(scale)),
        beta1(static_cast<W>(o.beta1)),
        rest1(static_cast<W>(1 - o.beta1)),
        beta2(static_cast<W>(o.beta2)),
        rest2(static_cast<W>(1 - o.beta2)),
        step_size(static_cast<W>(-lr / (1 - std::pow(o.beta1, t)))),
        root_scale(static_cast<W>(1 / std::sqrt(1 - std::pow(o.beta2, t)))),
        eps(static_cast<W>(o.eps)),
        coupled(static_cast<W>(decay == Decay::coupled ? o.weight_decay : 0)),
        keep(static_cast<W>(decay == Decay::decoupled ? 1 - lr * o.weight_decay : 1)) {}
};

template <class V, class G, class W>
struct Buffers {
  V* values;
  const G* grads;
  W *master, *m, *v;
};

template <class V, class G, class W>
void update(const Buffers<V, G, W>& b, const Coefficients<W>& coefficients, int64_t begin, int64_t end, bool decay) {
  const Coefficients<W> c = coefficients;
  const W coupled = decay ? c.coupled : W(0), keep = decay ? c.keep : W(1);
  V* const values = b.values;
  const G* const grads = b.grads;
  W *const master = b.master, *const ms = b.m, *const vs = b.v;
#pragma GCC ivdep
  for (int64_t i = begin; i < end; ++i) {
    const W p = master[i];
    const W g = math::fma(coupled, p, c.grad_scale * static_cast<W>(grads[i]));
    const W m = math::fma(c.beta1, ms[i], c.rest1 * g);
    const W v = math::fma(c.beta2, vs[i], c.rest2 * g * g);
    const W q = math::fma(c.step_size, m / math::fma(math::sqrt(v), c.root_scale, c.eps), keep * p);
    ms[i] = m;
    vs[i] = v;
    master[i] = q;
    if constexpr (std::is_same_v<V, bfloat16>) values[i] = bfloat16(q);
  }
}

}  // namespace

Adam::Adam(std::vector<FlatUnit> units, const OptimizerOptions& options, Decay decay)
    : Optimizer(std::move(units), options.state_arena), options_(options), decay_(decay) {
  for (const FlatUnit& unit : this->units()) {
    const Tensor m = add_state(unit, "m"), v = add_state(unit, "v");
    states_.push_back({m, v, add_master(unit)});
  }
}

void Adam::step(double lr, double grad_scale) {
  ++steps_;
  for (size_t u = 0; u < states_.size(); ++u) {
    const FlatUnit& unit = units()[u];
    const State& state = states_[u];
    with_unit_types(unit, [&](auto value, auto grad) {
      using V = decltype(value);
      using G = decltype(grad);
      using W = typename StateOf<V>::type;
      const Coefficients<W> c(options_, decay_, static_cast<double>(steps_), lr, grad_scale);
      const Buffers<V, G, W> b{unit.values.data<V>(), unit.grads.data<G>(), state.master.data<W>(), state.m.data<W>(),
                               state.v.data<W>()};
      for_each_segment(unit, [&](int64_t begin, int64_t end, bool decay) { update(b, c, begin, end, decay); });
    });
    ++unit.values.storage()->version;
  }
}

}  // namespace tessera
