// Bias and GELU on a GPU, with the CPU's bits.
#include "tensor/cuda/columns.cuh"
#include "tensor/ops/bias_gelu.h"
#include "tensor/ops/elementwise_list.h"

namespace tessera::cuda {
namespace {

template <class T>
struct Forward {
  const T *x, *bias;  // bias may be null
  T *h, *y;           // h may be x
  Columns at;
};

template <class T, bool kWhole>
__global__ void bias_gelu_kernel(Forward<T> f) {
  using A = Accumulate<T>;
  const ColumnThread at = column_thread<T>(f.at);
  if (at.first >= f.at.rows) return;
  const int c = f.at.length;
  Packed<T, kPart<T>> bias{};
  if (f.bias) bias = load_part<kWhole>(f.bias, at.j, c);
  for (int64_t i = at.first; i < at.last; ++i) {
    auto h = load_part<kWhole>(f.x + i * c, at.j, c);
    Packed<T, kPart<T>> y;
    for (int k = 0; k < kPart<T>; ++k) {
      if (f.bias) h.v[k] = T(static_cast<A>(h.v[k]) + static_cast<A>(bias.v[k]));
      y.v[k] = T(Gelu::f(static_cast<A>(h.v[k])));
    }
    store_part<kWhole>(f.h + i * c, at.j, c, h);
    store_part<kWhole>(f.y + i * c, at.j, c, y);
  }
}

template <class T>
struct Backward {
  const T *dy, *h;
  T* dh;                 // may be dy
  Accumulate<T>* parts;  // null where nobody wants the bias gradient
  Columns at;
};

template <class T, bool kWhole>
__global__ void bias_gelu_backward_kernel(Backward<T> f) {
  using A = Accumulate<T>;
  const ColumnThread at = column_thread<T>(f.at);
  if (at.first >= f.at.rows) return;
  const int c = f.at.length;
  Packed<A, kPart<T>> total{};
  for (int64_t i = at.first; i < at.last; ++i) {
    const auto dy = load_part<kWhole>(f.dy + i * c, at.j, c), h = load_part<kWhole>(f.h + i * c, at.j, c);
    Packed<T, kPart<T>> dh;
    for (int k = 0; k < kPart<T>; ++k) {
      dh.v[k] = T(static_cast<A>(dy.v[k]) * Gelu::df(static_cast<A>(h.v[k])));
      total.v[k] += static_cast<A>(dh.v[k]);
    }
    store_part<kWhole>(f.dh + i * c, at.j, c, dh);
  }
  if (f.parts) store_parts<kWhole, T>(f.parts, at, f.at, total.v);
}

}  // namespace

void bias_gelu(const BiasGelu& to, const Tensor& x, const Tensor* bias) {
  constexpr int64_t kRows = 8;  // for a thread: the bias is read once for them
  const int64_t c = x.dim(-1);
  if (x.numel() == 0) return;
  with_floating(x.dtype(), "bias_gelu", [&](auto t) {
    using T = decltype(t);
    const Forward<T> f{.x = x.device_data<T>(),
                       .bias = bias ? bias->device_data<T>() : nullptr,
                       .h = to.h.device_data<T>(),
                       .y = to.y.device_data<T>(),
                       .at = {x.numel() / c, static_cast<int>(c), kRows}};
    const auto queue = [&](auto whole) {
      launch(context(x), "bias_gelu", f.at.template grid<T>(), bias_gelu_kernel<T, decltype(whole)::value>, f);
    };
    with_parts<T>(c, queue, f.x, f.bias, f.h, f.y);
  });
}

void bias_gelu_backward(const Tensor& dh, const Tensor& dy, const Tensor& h, const Tensor* dbias) {
  const int64_t c = h.dim(-1), n = c == 0 ? 0 : h.numel() / c;
  with_floating(h.dtype(), "bias_gelu_backward", [&](auto t) {
    using T = decltype(t);
    using A = Accumulate<T>;
    const Tensor parts = dbias ? parts_for<A>(h, n, c) : Tensor();
    const Backward<T> f{.dy = dy.device_data<T>(),
                        .h = h.device_data<T>(),
                        .dh = dh.device_data<T>(),
                        .parts = dbias ? parts.device_data<A>() : nullptr,
                        .at = {n, static_cast<int>(c), kRowsTogether}};
    const auto queue = [&](auto whole) {
      launch(context(h), "bias_gelu_backward", f.at.template grid<T>(),
             bias_gelu_backward_kernel<T, decltype(whole)::value>, f);
    };
    with_parts<T>(c, queue, f.dy, f.h, f.dh);
    if (dbias) add_parts<A>("bias_gelu_backward", *dbias, parts);
  });
}

}  // namespace tessera::cuda
