// Adam and SGD on a GPU: gradients, state and values are read and written once, 16 bytes at a time where they are fp32.
#include "optim/cuda/updates.cuh"
#include "optim/cuda/updates.h"

namespace tessera::cuda {
namespace {

template <class V, class G, class W>
struct Adam {
  AdamStep<W> step;
  const UpdateNumbers* now;
  V* values;
  const G* grads;
  W *master, *m, *v;

  template <int N>
  __device__ void at(int64_t i, bool decay) const {
    AdamStep<W> c = step;
    if (!constants_of(c, now, decay)) return;
    const Packed<G, N> g = load<N>(grads + i);
    Packed<W, N> p = load<N>(master + i), ms = load<N>(m + i), vs = load<N>(v + i);
    for (int k = 0; k < N; ++k) {
      const AdamElement<W> e = updated(c, AdamElement<W>{p.v[k], ms.v[k], vs.v[k]}, static_cast<W>(g.v[k]));
      p.v[k] = e.p;
      ms.v[k] = e.m;
      vs.v[k] = e.v;
    }
    store(m + i, ms);
    store(v + i, vs);
    store(master + i, p);
    round_to(values, i, p);
  }
};

template <bool kMomentum, class V, class G, class W>
struct Sgd {
  SgdStep<W> step;
  const UpdateNumbers* now;
  V* values;
  const G* grads;
  W *master, *momentum;

  template <int N>
  __device__ void at(int64_t i, bool decay) const {
    SgdStep<W> c = step;
    if (!constants_of(c, now, decay)) return;
    const Packed<G, N> g = load<N>(grads + i);
    Packed<W, N> p = load<N>(master + i), b = p;
    if constexpr (kMomentum) b = load<N>(momentum + i);
    for (int k = 0; k < N; ++k) {
      const SgdElement<W> e = updated<kMomentum>(c, SgdElement<W>{p.v[k], b.v[k]}, static_cast<W>(g.v[k]));
      p.v[k] = e.p;
      b.v[k] = e.momentum;
    }
    if constexpr (kMomentum) store(momentum + i, b);
    store(master + i, p);
    round_to(values, i, p);
  }
};

}  // namespace

template <class W>
void adam(const FlatUnit& unit, const AdamState& state, const AdamStep<W>& step, const UpdateNumbers* now) {
  with_types<W>(unit, [&](auto value, auto grad) {
    using V = decltype(value);
    using G = decltype(grad);
    const Adam<V, G, W> f{step,
                          now,
                          reached_data<V>(unit.values),
                          unit.grads.device_data<G>(),
                          reached_data<W>(state.master),
                          reached_data<W>(state.m),
                          reached_data<W>(state.v)};
    for_each_segment("adam", unit, in_vectors(f.values, f.grads, f.master, f.m, f.v), f);
  });
}

template <class W>
void sgd(const FlatUnit& unit, const SgdState& state, const SgdStep<W>& step, const UpdateNumbers* now) {
  with_types<W>(unit, [&](auto value, auto grad) {
    using V = decltype(value);
    using G = decltype(grad);
    V* const values = reached_data<V>(unit.values);
    const G* const grads = unit.grads.device_data<G>();
    W* const master = reached_data<W>(state.master);
    if (state.momentum.defined()) {
      W* const momentum = reached_data<W>(state.momentum);
      const Sgd<true, V, G, W> f{step, now, values, grads, master, momentum};
      for_each_segment("sgd", unit, in_vectors(values, grads, master, momentum), f);
    } else {
      const Sgd<false, V, G, W> f{step, now, values, grads, master, nullptr};
      for_each_segment("sgd", unit, in_vectors(values, grads, master), f);
    }
  });
}

template void adam<float>(const FlatUnit&, const AdamState&, const AdamStep<float>&, const UpdateNumbers*);
template void adam<double>(const FlatUnit&, const AdamState&, const AdamStep<double>&, const UpdateNumbers*);
template void sgd<float>(const FlatUnit&, const SgdState&, const SgdStep<float>&, const UpdateNumbers*);
template void sgd<double>(const FlatUnit&, const SgdState&, const SgdStep<double>&, const UpdateNumbers*);

}  // namespace tessera::cuda
