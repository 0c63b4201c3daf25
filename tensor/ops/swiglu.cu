// SwiGLU on a GPU, with the CPU's bits.
#include "tensor/cuda/columns.cuh"
#include "tensor/ops/elementwise_list.h"
#include "tensor/ops/swiglu.h"

namespace tessera::cuda {
namespace {

// Rows are those of y: a row of x is one of gates and one of what they let through.
template <class T>
struct Forward {
  const T* x;
  T* y;
  Columns at;
};

template <class T, bool kWhole>
__global__ void swiglu_kernel(Forward<T> f) {
  using A = Accumulate<T>;
  const ColumnThread at = column_thread<T>(f.at);
  const int n = f.at.length;
  for (int64_t i = at.first; i < at.last; ++i) {
    const T* const gates = f.x + 2 * i * n;
    const auto gate = load_part<kWhole>(gates, at.j, n), up = load_part<kWhole>(gates + n, at.j, n);
    Packed<T, kPart<T>> y;
    for (int k = 0; k < kPart<T>; ++k) y.v[k] = T(Silu::f(static_cast<A>(gate.v[k])) * static_cast<A>(up.v[k]));
    store_part<kWhole>(f.y + i * n, at.j, n, y);
  }
}

template <class T>
struct Backward {
  const T *dy, *x;
  T* dx;
  Columns at;
};

template <class T, bool kWhole>
__global__ void swiglu_backward_kernel(Backward<T> f) {
  using A = Accumulate<T>;
  const ColumnThread at = column_thread<T>(f.at);
  const int n = f.at.length;
  for (int64_t i = at.first; i < at.last; ++i) {
    const T* const gates = f.x + 2 * i * n;
    T* const dgates = f.dx + 2 * i * n;
    const auto gate = load_part<kWhole>(gates, at.j, n), up = load_part<kWhole>(gates + n, at.j, n),
               dy = load_part<kWhole>(f.dy + i * n, at.j, n);
    Packed<T, kPart<T>> dgate, dup;
    for (int k = 0; k < kPart<T>; ++k) {
      const A g = static_cast<A>(gate.v[k]), d = static_cast<A>(dy.v[k]);
      dgate.v[k] = T(d * static_cast<A>(up.v[k]) * Silu::df(g));
      dup.v[k] = T(d * Silu::f(g));
    }
    store_part<kWhole>(dgates, at.j, n, dgate);
    store_part<kWhole>(dgates + n, at.j, n, dup);
  }
}

}  // namespace

void swiglu(const Tensor& y, const Tensor& x) {
  if (y.numel() == 0) return;
  const int64_t n = y.dim(-1);
  with_floating(x.dtype(), "swiglu", [&](auto t) {
    using T = decltype(t);
    const Forward<T> f{
        .x = x.device_data<T>(), .y = y.device_data<T>(), .at = {.rows = y.numel() / n, .length = static_cast<int>(n)}};
    const auto queue = [&](auto whole) {
      launch(context(x), "swiglu", f.at.template grid<T>(), swiglu_kernel<T, decltype(whole)::value>, f);
    };
    with_parts<T>(n, queue, f.x, f.y);
  });
}

void swiglu_backward(const Tensor& dx, const Tensor& dy, const Tensor& x) {
  if (dy.numel() == 0) return;
  const int64_t n = dy.dim(-1);
  with_floating(x.dtype(), "swiglu_backward", [&](auto t) {
    using T = decltype(t);
    const Backward<T> f{.dy = dy.device_data<T>(),
                        .x = x.device_data<T>(),
                        .dx = dx.device_data<T>(),
                        .at = {.rows = dy.numel() / n, .length = static_cast<int>(n)}};
    const auto queue = [&](auto whole) {
      launch(context(x), "swiglu_backward", f.at.template grid<T>(), swiglu_backward_kernel<T, decltype(whole)::value>,
             f);
    };
    with_parts<T>(n, queue, f.dy, f.x, f.dx);
  });
}

}  // namespace tessera::cuda
