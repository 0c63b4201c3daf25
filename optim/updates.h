// What an update makes of one element. The loops of the CPU and the kernels of the GPU call the same functions, so both
// give the same bits.
#pragma once
#include <cmath>
#include <type_traits>

#include "nn/flat.h"
#include "optim/optimizer.h"
#include "tensor/math.h"

namespace tessera {

// The type that updates of values of type V are computed in, and their state kept in.
template <class V>
struct StateOf {
  using type = float;
};
template <>
struct StateOf<double> {
  using type = double;
};

// Calls f(V{}, G{}) with the C++ types of the unit's values and gradients.
template <class F>
void with_unit_types(const FlatUnit& unit, const F& f) {
  with_floating(unit.values.dtype(), "optimizer",
                [&](auto v) { with_floating(unit.grads.dtype(), "optimizer", [&](auto g) { f(v, g); }); });
}

enum class Decay { coupled, decoupled };  // L2 regularisation inside the gradient, or AdamW

// What Adam keeps of a unit beside its values; `master` is what is updated, maybe the values themselves.
struct AdamState {
  Tensor m, v, master;
};

// The constants of one step, rounded once to the type the update is computed in.
template <class W>
struct AdamStep {
  W grad_scale, beta1, rest1, beta2, rest2, step_size, root_scale, eps;
  W coupled, keep;

  static AdamStep of(const OptimizerOptions& o, Decay decay, double t, double lr, double scale) {
    return {.grad_scale = static_cast<W>(scale),
            .beta1 = static_cast<W>(o.beta1),
            .rest1 = static_cast<W>(1 - o.beta1),
            .beta2 = static_cast<W>(o.beta2),
            .rest2 = static_cast<W>(1 - o.beta2),
            .step_size = static_cast<W>(-lr / (1 - std::pow(o.beta1, t))),
            .root_scale = static_cast<W>(1 / std::sqrt(1 - std::pow(o.beta2, t))),
            .eps = static_cast<W>(o.eps),
            .coupled = static_cast<W>(decay == Decay::coupled ? o.weight_decay : 0),
            .keep = static_cast<W>(decay == Decay::decoupled ? 1 - lr * o.weight_decay : 1)};
  }

  // The same for a slot with weight decay or without.
  constexpr AdamStep of_slot(bool decays) const {
    AdamStep step = *this;
    if (!decays) {
      step.coupled = W(0);
      step.keep = W(1);
    }
    return step;
  }
};

template <class W>
struct AdamElement {
  W p, m, v;
};

template <class W>
constexpr AdamElement<W> updated(const AdamStep<W>& c, const AdamElement<W>& old, W grad) {
  const W g = math::fma(c.coupled, old.p, c.grad_scale * grad);
  const W m = math::fma(c.beta1, old.m, c.rest1 * g);
  const W v = math::fma(c.beta2, old.v, c.rest2 * g * g);
  const W p = math::fma(c.step_size, m / math::fma(math::sqrt(v), c.root_scale, c.eps), c.keep * old.p);
  return {p, m, v};
}

// The same three of SGD; without momentum `momentum` is undefined.
struct SgdState {
  Tensor momentum, master;
};

template <class W>
struct SgdStep {
  W grad_scale, momentum, decay, lr;

  constexpr SgdStep of_slot(bool decays) const {
    SgdStep step = *this;
    if (!decays) step.decay = W(0);
    return step;
  }
};

template <class W>
struct SgdElement {
  W p, momentum;
};

template <bool kMomentum, class W>
constexpr SgdElement<W> updated(const SgdStep<W>& c, const SgdElement<W>& old, W grad) {
  W g = math::fma(c.decay, old.p, c.grad_scale * grad);
  if constexpr (kMomentum) g = math::fma(c.momentum, old.momentum, g);
  return {math::fma(-c.lr, g, old.p), g};
}

}  // namespace tessera
