// SwiGLU on a GPU, with the CPU's bits. Rows are those of y: of x, row 2 i has its gates, and the next what they let
// through.
#include "tensor/cuda/column_kernel.cuh"
#include "tensor/ops/elementwise_list.h"
#include "tensor/ops/swiglu.h"

namespace tessera::cuda {
namespace {

template <class T>
struct SwigluForward {
  using A = Accumulate<T>;
  const T* x;
  T* y;

  template <class Part>
  __device__ void operator()(const Part& at) const {
    const auto gate = at.load(x, 2 * at.first), up = at.load(x, 2 * at.first + 1);
    typename Part::Elements out;
    for (int k = 0; k < kPart<T>; ++k) out.v[k] = T(Silu::f(static_cast<A>(gate.v[k])) * static_cast<A>(up.v[k]));
    at.store(y, at.first, out);
  }
};

template <class T>
struct SwigluBackward {
  using A = Accumulate<T>;
  const T *dy, *x;
  T* dx;

  template <class Part>
  __device__ void operator()(const Part& at) const {
    const auto gate = at.load(x, 2 * at.first), up = at.load(x, 2 * at.first + 1), from = at.load(dy, at.first);
    typename Part::Elements dgate, dup;
    for (int k = 0; k < kPart<T>; ++k) {
      const A g = static_cast<A>(gate.v[k]), d = static_cast<A>(from.v[k]);
      dgate.v[k] = T(d * static_cast<A>(up.v[k]) * Silu::df(g));
      dup.v[k] = T(d * Silu::f(g));
    }
    at.store(dx, 2 * at.first, dgate);
    at.store(dx, 2 * at.first + 1, dup);
  }
};

}  // namespace

void swiglu(const Tensor& y, const Tensor& x) {
  if (y.numel() == 0) return;
  const int64_t n = y.dim(-1);
  with_floating(x.dtype(), "swiglu", [&](auto t) {
    using T = decltype(t);
    const SwigluForward<T> f{.x = x.device_data<T>(), .y = y.device_data<T>()};
    for_columns<T>(context(x), "swiglu", {y.numel() / n, static_cast<int>(n)}, f, f.x, f.y);
  });
}

void swiglu_backward(const Tensor& dx, const Tensor& dy, const Tensor& x) {
  if (dy.numel() == 0) return;
  const int64_t n = dy.dim(-1);
  with_floating(x.dtype(), "swiglu_backward", [&](auto t) {
    using T = decltype(t);
    const SwigluBackward<T> f{.dy = dy.device_data<T>(), .x = x.device_data<T>(), .dx = dx.device_data<T>()};
    for_columns<T>(context(x), "swiglu_backward", {dy.numel() / n, static_cast<int>(n)}, f, f.dy, f.x, f.dx);
  });
}

}  // namespace tessera::cuda
