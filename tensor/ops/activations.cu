// Activations with a bias or a gate on a GPU, bitwise identical to the CPU.
#include <cstdint>

#include "tensor/cuda/columns.cuh"
#include "tensor/ops/activations.h"

namespace tessera::cuda {

namespace {

template <class T, class Op>
struct BiasActivationForward {
  using A = Accumulate<T>;
  const T *x, *bias;
  T *h, *y;

  template <class Position>
  __device__ void operator()(const Position& at) const {
    typename Position::Elements added{}, out;
    if (bias) added = at.load(bias);
    for (int64_t i = at.first; i < at.last; ++i) {
      auto in = at.load(x, i);
      for (int k = 0; k < kVecElems<T>; ++k) {
        if (bias) in.v[k] = T(static_cast<A>(in.v[k]) + static_cast<A>(added.v[k]));
        out.v[k] = T(Op::f(static_cast<A>(in.v[k])));
      }
      at.store(h, i, in);
      at.store(y, i, out);
    }
  }
};

template <class T, class Op>
struct BiasActivationBackward {
  using A = Accumulate<T>;
  const T *dy, *h;
  T* dh;        // may be dy
  A* partials;  // null if no bias gradient is requested

  template <class Position>
  __device__ void operator()(const Position& at) const {
    Packed<A, kVecElems<T>> total{};
    for (int64_t i = at.first; i < at.last; ++i) {
      const auto up = at.load(dy, i), in = at.load(h, i);
      typename Position::Elements down;
      for (int k = 0; k < kVecElems<T>; ++k) {
        down.v[k] = T(static_cast<A>(up.v[k]) * Op::df(static_cast<A>(in.v[k])));
        total.v[k] += static_cast<A>(down.v[k]);
      }
      at.store(dh, i, down);
    }
    if (partials) at.store_sums(partials, total);
  }
};

}  // namespace

void bias_activation(const Activated& to, const Tensor& x, const Tensor* bias, Activation kind) {
  constexpr int64_t kRows = 8;  // per thread, which reads the bias once
  const int64_t c = x.dim(-1);
  if (x.numel() == 0) return;
  with_floating(x.dtype(), "bias_gelu", [&](auto t) {
    using T = decltype(t);
    with_activation(kind, [&](auto op) {
      const BiasActivationForward<T, decltype(op)> f{.x = x.device_data<T>(),
                                                     .bias = bias ? bias->device_data<T>() : nullptr,
                                                     .h = to.h.device_data<T>(),
                                                     .y = to.y.device_data<T>()};
      for_columns<T>(context(x), "bias_gelu", {x.numel() / c, static_cast<int>(c), kRows}, f, f.x, f.bias, f.h, f.y);
    });
  });
}

void bias_activation_backward(const Tensor& dh, const Tensor& dy, const Tensor& h, const Tensor* dbias,
                              Activation kind) {
  const int64_t c = h.dim(-1), n = c == 0 ? 0 : h.numel() / c;
  with_floating(h.dtype(), "bias_gelu_backward", [&](auto t) {
    using T = decltype(t);
    using A = Accumulate<T>;
    const Tensor partials = dbias ? make_partials<A>(h, n, c) : Tensor();
    with_activation(kind, [&](auto op) {
      const BiasActivationBackward<T, decltype(op)> f{.dy = dy.device_data<T>(),
                                                      .h = h.device_data<T>(),
                                                      .dh = dh.device_data<T>(),
                                                      .partials = dbias ? partials.device_data<A>() : nullptr};
      for_columns<T>(context(h), "bias_gelu_backward", {n, static_cast<int>(c), rows_per_run(n)}, f, f.dy, f.h, f.dh);
    });
    if (dbias) add_partials<A>("bias_gelu_backward", *dbias, partials);
  });
}

// With a gate: row i of y has its gates in row 2 i of x, its values in row 2 i + 1.

namespace {

template <class T, class Op>
struct GatedForward {
  using A = Accumulate<T>;
  const T* x;
  T* y;

  template <class Position>
  __device__ void operator()(const Position& at) const {
    const auto gate = at.load(x, 2 * at.first), up = at.load(x, 2 * at.first + 1);
    typename Position::Elements out;
    for (int k = 0; k < kVecElems<T>; ++k) out.v[k] = T(Op::f(static_cast<A>(gate.v[k])) * static_cast<A>(up.v[k]));
    at.store(y, at.first, out);
  }
};

template <class T, class Op>
struct GatedBackward {
  using A = Accumulate<T>;
  const T *dy, *x;
  T* dx;

  template <class Position>
  __device__ void operator()(const Position& at) const {
    const auto gate = at.load(x, 2 * at.first), up = at.load(x, 2 * at.first + 1), from = at.load(dy, at.first);
    typename Position::Elements dgate, dup;
    for (int k = 0; k < kVecElems<T>; ++k) {
      const A g = static_cast<A>(gate.v[k]), d = static_cast<A>(from.v[k]);
      dgate.v[k] = T(d * static_cast<A>(up.v[k]) * Op::df(g));
      dup.v[k] = T(d * Op::f(g));
    }
    at.store(dx, 2 * at.first, dgate);
    at.store(dx, 2 * at.first + 1, dup);
  }
};

}  // namespace

void gated_activation(const Tensor& y, const Tensor& x, Activation kind) {
  if (y.numel() == 0) return;
  const int64_t n = y.dim(-1);
  with_floating(x.dtype(), "swiglu", [&](auto t) {
    using T = decltype(t);
    with_activation(kind, [&](auto op) {
      const GatedForward<T, decltype(op)> f{.x = x.device_data<T>(), .y = y.device_data<T>()};
      for_columns<T>(context(x), "swiglu", {y.numel() / n, static_cast<int>(n)}, f, f.x, f.y);
    });
  });
}

void gated_activation_backward(const Tensor& dx, const Tensor& dy, const Tensor& x, Activation kind) {
  if (dy.numel() == 0) return;
  const int64_t n = dy.dim(-1);
  with_floating(x.dtype(), "swiglu_backward", [&](auto t) {
    using T = decltype(t);
    with_activation(kind, [&](auto op) {
      const GatedBackward<T, decltype(op)> f{
          .dy = dy.device_data<T>(), .x = x.device_data<T>(), .dx = dx.device_data<T>()};
      for_columns<T>(context(x), "swiglu_backward", {dy.numel() / n, static_cast<int>(n)}, f, f.dy, f.x, f.dx);
    });
  });
}

}  // namespace tessera::cuda
