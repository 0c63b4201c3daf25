// Adam and AdamW: the loops over the units.
#include "optim/adam.h"

#include <cmath>
#include <type_traits>

#include "optim/cuda/updates.h"
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
  for_each_segment(unit,
                   [&](int64_t begin, int64_t end, bool decay) { update_range(b, step.of_slot(decay), begin, end); });
}

}  // namespace

Adam::Adam(std::vector<FlatUnit> units, const OptimizerOptions& options, Decay decay)
    : Optimizer(std::move(units), options.state_arena), options_(options), decay_(decay) {
  for (const FlatUnit& unit : this->units()) {
    const Tensor m = add_state(unit, "m"), v = add_state(unit, "v");
    states_.push_back({m, v, add_master(unit)});
  }
}

UpdateNumbers Adam::next(double lr) const {
  const auto t = static_cast<double>(steps() + 1);
  return {.lr = lr,
          .step_size = -lr / (1 - std::pow(options_.beta1, t)),
          .root_scale = 1 / std::sqrt(1 - std::pow(options_.beta2, t)),
          .keep = decay_ == Decay::decoupled ? 1 - lr * options_.weight_decay : 1};
}

void Adam::update(const UpdateNumbers& now, const UpdateNumbers* on_gpu) {
  for (size_t u = 0; u < states_.size(); ++u) {
    const FlatUnit& unit = units()[u];
    with_unit_types(unit, [&](auto value, auto grad) {
      using V = decltype(value);
      using G = decltype(grad);
      using W = Accumulate<V>;
      const auto c = AdamStep<W>::of(options_, decay_).at(now);
      on_device(
          unit.values.device(), [&] { update_on_cpu<V, G>(unit, states_[u], c); },
          [&] { cuda::adam(unit, states_[u], c, on_gpu); });
    });
  }
}

}  // namespace tessera
