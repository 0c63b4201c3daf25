// The update of one element. The loops of the CPU and the kernels of the GPU call the same functions, so both
// give the same bits.
#pragma once
#include <type_traits>

#include "nn/parameter.h"
#include "optim/optimizer.h"
#include "tensor/math.h"

namespace tessera {

// Calls f(V{}, G{}) with the C++ types of the unit's values and gradients.
template <class F>
void with_unit_types(const FlatUnit& unit, const F& f) {
  with_floating(unit.values.dtype(), "optimizer",
                [&](auto v) { with_floating(unit.grads.dtype(), "optimizer", [&](auto g) { f(v, g); }); });
}

// Calls f(T{}) with the type of a tensor of float32 or float64, as what an optimizer keeps is.
template <class F>
void with_wide(const Tensor& x, const F& f) {
  x.dtype() == DType::float64 ? f(double{}) : f(float{});
}

enum class Decay { coupled, decoupled };  // L2 regularisation inside the gradient, or AdamW

// Adam's state of a unit; `master` is updated, and may be the values themselves.
struct AdamState {
  Tensor m, v, master;
};

// The constants of one step, rounded once to the type the update is computed in: those of all steps, and those of
// `now`.
template <class W>
struct AdamStep {
  W beta1, rest1, beta2, rest2, eps, coupled;
  W grad_scale = 1, step_size = 0, root_scale = 0, keep = 1;

  static AdamStep of(const OptimizerOptions& o, Decay decay) {
    return {.beta1 = static_cast<W>(o.beta1),
            .rest1 = static_cast<W>(1 - o.beta1),
            .beta2 = static_cast<W>(o.beta2),
            .rest2 = static_cast<W>(1 - o.beta2),
            .eps = static_cast<W>(o.eps),
            .coupled = static_cast<W>(decay == Decay::coupled ? o.weight_decay : 0)};
  }
  constexpr AdamStep at(const UpdateNumbers& now) const {
    AdamStep step = *this;
    step.grad_scale = static_cast<W>(now.grad_scale);
    step.step_size = static_cast<W>(now.step_size);
    step.root_scale = static_cast<W>(now.root_scale);
    step.keep = static_cast<W>(now.keep);
    return step;
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
  W momentum, decay;
  W grad_scale = 1, lr = 0;

  static SgdStep of(const OptimizerOptions& o) {
    return {.momentum = static_cast<W>(o.momentum), .decay = static_cast<W>(o.weight_decay)};
  }
  constexpr SgdStep at(const UpdateNumbers& now) const {
    SgdStep step = *this;
    step.grad_scale = static_cast<W>(now.grad_scale);
    step.lr = static_cast<W>(now.lr);
    return step;
  }

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

// Of Muon: what is made of an element before its matrix is made orthogonal, and its new value after that. The state is
// SGD's.
template <class W>
struct MuonStep {
  W momentum;
  W grad_scale = 1, lr = 0, keep = 1;

  static MuonStep of(const OptimizerOptions& o) { return {.momentum = static_cast<W>(o.momentum)}; }
  constexpr MuonStep at(const UpdateNumbers& now) const {
    MuonStep step = *this;
    step.grad_scale = static_cast<W>(now.grad_scale);
    step.lr = static_cast<W>(now.lr);
    step.keep = static_cast<W>(now.keep);
    return step;
  }

  constexpr MuonStep of_slot(bool decays) const {
    MuonStep step = *this;
    if (!decays) step.keep = W(1);
    return step;
  }
};

template <class W>
struct MuonElement {
  W momentum, update;
};

template <class W>
constexpr MuonElement<W> with_momentum(const MuonStep<W>& c, W momentum, W grad) {
  const W g = c.grad_scale * grad, m = math::fma(c.momentum, momentum, g);
  return {m, math::fma(c.momentum, m, g)};
}

template <class W>
constexpr W updated(const MuonStep<W>& c, W p, W update) {
  return math::fma(-c.lr, update, c.keep * p);
}

}  // namespace tessera
