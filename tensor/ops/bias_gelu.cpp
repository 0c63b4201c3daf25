// Threads split the rows. A bias gradient is summed over 64 rows at a time, and then over these sums in order, so it
// does not depend on the number of threads.
#include "tensor/ops/bias_gelu.h"

#include <algorithm>
#include <type_traits>

#include "tensor/cpu/vectorize.h"
#include "tensor/ops/elementwise_list.h"

namespace tessera {
namespace {

constexpr int64_t kChunk = 32;  // rows whose bias gradients are summed together, as on a GPU

// h = x + b; h may be x. A loop that stores two arrays of narrow elements is not vectorised, so this is one of its own.
template <class T>
void add_bias(const T* x, const T* b, T* h, int64_t c) {
  using A = Accumulate<T>;
  if (b == nullptr) {
    if (h != x) std::copy(x, x + c, h);
    return;
  }
#pragma GCC ivdep
  for (int64_t j = 0; j < c; ++j) h[j] = T(static_cast<A>(x[j]) + static_cast<A>(b[j]));
}

void bias_gelu_on_cpu(const BiasGelu& out, const Tensor& x, const Tensor* bias) {
  const int64_t c = x.dim(-1), n = x.numel() / std::max<int64_t>(c, 1);
  with_floating(x.dtype(), "bias_gelu", [&](auto t) {
    using T = decltype(t);
    using A = Accumulate<T>;
    const T *const in = x.data<T>(), *const b = bias ? bias->data<T>() : nullptr;
    T *const ph = out.h.data<T>(), *const py = out.y.data<T>();
    cpu::parallel_for(n, std::max<int64_t>(1, cpu::kGrain / c), [=](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        const T* const row = in + i * c;
        T *const h = ph + i * c, *const y = py + i * c;
        if constexpr (std::is_same_v<T, A>) {
#pragma GCC ivdep
          for (int64_t j = 0; j < c; ++j) y[j] = Gelu::f(h[j] = b ? row[j] + b[j] : row[j]);
        } else {
          add_bias(row, b, h, c);
          for (int64_t j = 0; j < c; ++j) y[j] = T(Gelu::f(static_cast<A>(h[j])));
        }
      }
    });
  });
}

void bias_gelu_backward_on_cpu(const Tensor& dh, const Tensor& dy, const Tensor& h, Tensor* dbias) {
  const int64_t c = h.dim(-1), n = h.numel() / std::max<int64_t>(c, 1);
  const int64_t chunks = std::max<int64_t>(1, (n + kChunk - 1) / kChunk);
  const Tensor total = h.make({chunks, c}, wide_of(h.dtype()));
  with_floating(h.dtype(), "bias_gelu_backward", [&](auto t) {
    using T = decltype(t);
    using A = Accumulate<T>;
    const T *const pg = dy.data<T>(), *const ph = h.data<T>();
    T* const out = dh.data<T>();
    A* const sums = total.data<A>();
    cpu::parallel_for(chunks, 1, [=](int64_t begin, int64_t end) {
      for (int64_t chunk = begin; chunk < end; ++chunk) {
        A* const sum = sums + chunk * c;
        std::fill(sum, sum + c, A(0));
        for (int64_t i = chunk * kChunk; i < std::min(n, (chunk + 1) * kChunk); ++i) {
          const T *const g = pg + i * c, *const v = ph + i * c;
          T* const to = out + i * c;
#pragma GCC ivdep
          for (int64_t j = 0; j < c; ++j) to[j] = T(static_cast<A>(g[j]) * Gelu::df(static_cast<A>(v[j])));
          for (int64_t j = 0; j < c; ++j) sum[j] += static_cast<A>(to[j]);
        }
      }
    });
    cpu::parallel_for(c, cpu::kGrain, [=](int64_t begin, int64_t end) {
      for (int64_t chunk = 1; chunk < chunks; ++chunk)
        for (int64_t j = begin; j < end; ++j) sums[j] += sums[chunk * c + j];
    });
  });
  if (dbias) dbias->copy_from(total.narrow(0, 0, 1).reshape({c}));
}

}  // namespace

BiasGelu bias_gelu(Tensor&& x_any, const Tensor& bias_any) {
  const int64_t c = x_any.dim(-1);
  if (bias_any.defined() && (bias_any.dtype() != x_any.dtype() || bias_any.rank() != 1 || bias_any.dim(0) != c))
    throw Error("[bias_gelu] bias is " + bias_any.describe() + "; x is " + x_any.describe());
  const Tensor x = x_any.contiguous(), bias = bias_any.defined() ? bias_any.contiguous() : Tensor();
  x_any = Tensor();
  BiasGelu out{x.unique() ? x : x.make(x.shape()), x.make(x.shape())};
  const Tensor* const added = bias.defined() ? &bias : nullptr;
  on_device(
      x.device(), [&] { bias_gelu_on_cpu(out, x, added); }, [&] { cuda::bias_gelu(out, x, added); });
  return out;
}

Tensor bias_gelu_backward(Tensor&& dy_any, const Tensor& h_any, Tensor* dbias) {
  if (!(dy_any.shape() == h_any.shape()) || dy_any.dtype() != h_any.dtype())
    throw Error("[bias_gelu_backward] dy is " + dy_any.describe() + "; h is " + h_any.describe());
  const Tensor dy = dy_any.contiguous(), h = h_any.contiguous();
  dy_any = Tensor();
  Tensor dh = dy.unique() ? dy : h.make(h.shape());
  on_device(
      h.device(), [&] { bias_gelu_backward_on_cpu(dh, dy, h, dbias); },
      [&] { cuda::bias_gelu_backward(dh, dy, h, dbias); });
  return dh;
}

}  // namespace tessera
