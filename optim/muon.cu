// Muon on a GPU: one pass over a unit before its matrices are made orthogonal, and one after; and what lies between the
// products of an iteration.
#include "optim/cuda/muon.h"
#include "optim/cuda/updates.cuh"

namespace tessera::cuda {
namespace {

template <class G, class W>
struct Momentum {
  MuonStep<W> step;
  const UpdateNumbers* now;
  const G* grads;
  W *momentum, *update;

  template <int N>
  __device__ void at(int64_t i, bool decay) const {
    MuonStep<W> c = step;
    if (!constants_of(c, now, decay)) return;
    const Packed<G, N> g = load<N>(grads + i);
    Packed<W, N> m = load<N>(momentum + i), u = m;
    for (int k = 0; k < N; ++k) {
      const MuonElement<W> e = with_momentum(c, m.v[k], static_cast<W>(g.v[k]));
      m.v[k] = e.momentum;
      u.v[k] = e.update;
    }
    store(momentum + i, m);
    store(update + i, u);
  }
};

template <class V, class W>
struct Applied {
  MuonStep<W> step;
  const UpdateNumbers* now;
  V* values;
  W* master;
  const W* update;

  template <int N>
  __device__ void at(int64_t i, bool decay) const {
    MuonStep<W> c = step;
    if (!constants_of(c, now, decay)) return;
    Packed<W, N> p = load<N>(master + i);
    const Packed<W, N> u = load<N>(update + i);
    for (int k = 0; k < N; ++k) p.v[k] = updated(c, p.v[k], u.v[k]);
    store(master + i, p);
    round_to(values, i, p);
  }
};

template <class W>
struct Normalised {
  const double* square;
  double eps;
  __device__ W operator()(W x) const { return x * static_cast<W>(1 / (math::sqrt(*square) + eps)); }
};

template <class W>
struct Blended {
  W a, b;
  __device__ W operator()(W x, W y) const { return math::fma(a, x, b * y); }
};

}  // namespace

template <class W>
void add_momentum(const FlatUnit& unit, const Tensor& momentum, const Tensor& update, const MuonStep<W>& step,
                  const UpdateNumbers* now) {
  with_types<W>(unit, [&](auto, auto grad) {
    using G = decltype(grad);
    const Momentum<G, W> f{step, now, unit.grads.device_data<G>(), reached_data<W>(momentum), update.device_data<W>()};
    for_each_segment("muon momentum", unit, in_vectors(f.grads, f.momentum, f.update), f);
  });
}

template <class W>
void apply_update(const FlatUnit& unit, const Tensor& master, const Tensor& update, const MuonStep<W>& step,
                  const UpdateNumbers* now) {
  with_types<W>(unit, [&](auto value, auto) {
    using V = decltype(value);
    const Applied<V, W> f{step, now, reached_data<V>(unit.values), reached_data<W>(master), update.device_data<W>()};
    for_each_segment("muon", unit, in_vectors(f.values, f.master, f.update), f);
  });
}

void normalise(const Tensor& x, const Tensor& square, double eps) {
  with_wide(x, [&](auto t) {
    using W = decltype(t);
    map<W, W>("normalise", Normalised<W>{square.device_data<double>(), eps}, x, x);
  });
}

void blend(const Tensor& y, const Tensor& x, double a, double b) {
  with_wide(y, [&](auto t) {
    using W = decltype(t);
    map<W, W, W>("blend", Blended<W>{static_cast<W>(a), static_cast<W>(b)}, y, x, y);
  });
}

template void add_momentum<float>(const FlatUnit&, const Tensor&, const Tensor&, const MuonStep<float>&,
                                  const UpdateNumbers*);
template void add_momentum<double>(const FlatUnit&, const Tensor&, const Tensor&, const MuonStep<double>&,
                                   const UpdateNumbers*);
template void apply_update<float>(const FlatUnit&, const Tensor&, const Tensor&, const MuonStep<float>&,
                                  const UpdateNumbers*);
template void apply_update<double>(const FlatUnit&, const Tensor&, const Tensor&, const MuonStep<double>&,
                                   const UpdateNumbers*);

}  // namespace tessera::cuda
