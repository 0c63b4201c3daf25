// Threads split the rows.
#include "tensor/ops/swiglu.h"

#include <algorithm>

#include "tensor/cpu/vectorize.h"
#include "tensor/ops/elementwise_list.h"

namespace tessera {
namespace {

int64_t rows_together(int64_t f) { return std::max<int64_t>(1, cpu::kGrain / std::max<int64_t>(f, 1)); }

void swiglu_on_cpu(const Tensor& y, const Tensor& x) {
  const int64_t f = y.dim(-1), n = f == 0 ? 0 : y.numel() / f;
  with_floating(x.dtype(), "swiglu", [&](auto t) {
    using T = decltype(t);
    using A = Accumulate<T>;
    const T* const in = x.data<T>();
    T* const out = y.data<T>();
    cpu::parallel_for(n, rows_together(f), [=](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        const T *const gate = in + 2 * i * f, *const up = gate + f;
        T* const to = out + i * f;
#pragma GCC ivdep
        for (int64_t j = 0; j < f; ++j) to[j] = T(Silu::f(static_cast<A>(gate[j])) * static_cast<A>(up[j]));
      }
    });
  });
}

void swiglu_backward_on_cpu(const Tensor& dx, const Tensor& dy, const Tensor& x) {
  const int64_t f = dy.dim(-1), n = f == 0 ? 0 : dy.numel() / f;
  with_floating(x.dtype(), "swiglu_backward", [&](auto t) {
    using T = decltype(t);
    using A = Accumulate<T>;
    const T *const in = x.data<T>(), *const given = dy.data<T>();
    T* const out = dx.data<T>();
    cpu::parallel_for(n, rows_together(f), [=](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        const T *const gate = in + 2 * i * f, *const up = gate + f, *const g = given + i * f;
        T *const dgate = out + 2 * i * f, *const dup = dgate + f;
        // Two loops: one that stores two arrays of narrow elements is not vectorised.
#pragma GCC ivdep
        for (int64_t j = 0; j < f; ++j)
          dgate[j] = T(static_cast<A>(g[j]) * static_cast<A>(up[j]) * Silu::df(static_cast<A>(gate[j])));
#pragma GCC ivdep
        for (int64_t j = 0; j < f; ++j) dup[j] = T(static_cast<A>(g[j]) * Silu::f(static_cast<A>(gate[j])));
      }
    });
  });
}

Shape halved(Shape shape) {
  shape[shape.rank() - 1] /= 2;
  return shape;
}

}  // namespace

Tensor swiglu(const Tensor& x_any) {
  if (x_any.rank() < 1 || x_any.dim(-1) % 2 != 0)
    throw Error("[swiglu] x is " + x_any.describe() + "; expected (..., 2 F), gates and then what they let through");
  const Tensor x = x_any.contiguous(), y = x.make(halved(x.shape()));
  on_device(
      x.device(), [&] { swiglu_on_cpu(y, x); }, [&] { cuda::swiglu(y, x); });
  return y;
}

Tensor swiglu_backward(const Tensor& dy_any, const Tensor& x_any) {
  if (x_any.rank() < 1 || !(dy_any.shape() == halved(x_any.shape())) || dy_any.dtype() != x_any.dtype())
    throw Error("[swiglu_backward] dy is " + dy_any.describe() + "; x is " + x_any.describe());
  const Tensor dy = dy_any.contiguous(), x = x_any.contiguous(), dx = x.make(x.shape());
  on_device(
      x.device(), [&] { swiglu_backward_on_cpu(dx, dy, x); }, [&] { cuda::swiglu_backward(dx, dy, x); });
  return dx;
}

}  // namespace tessera
