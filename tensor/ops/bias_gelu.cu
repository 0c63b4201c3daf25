// Bias and GELU on a GPU, with the CPU's bits.
#include "tensor/cuda/column_kernel.cuh"
#include "tensor/ops/bias_gelu.h"
#include "tensor/ops/elementwise_list.h"

namespace tessera::cuda {
namespace {

template <class T>
struct BiasGeluForward {
  using A = Accumulate<T>;
  const T *x, *bias;  // bias may be null
  T *h, *y;           // h may be x

  template <class Part>
  __device__ void operator()(const Part& at) const {
    typename Part::Elements added{}, out;
    if (bias) added = at.load(bias);
    for (int64_t i = at.first; i < at.last; ++i) {
      auto in = at.load(x, i);
      for (int k = 0; k < kPart<T>; ++k) {
        if (bias) in.v[k] = T(static_cast<A>(in.v[k]) + static_cast<A>(added.v[k]));
        out.v[k] = T(Gelu::f(static_cast<A>(in.v[k])));
      }
      at.store(h, i, in);
      at.store(y, i, out);
    }
  }
};

template <class T>
struct BiasGeluBackward {
  using A = Accumulate<T>;
  const T *dy, *h;
  T* dh;     // may be dy
  A* parts;  // null where nobody wants the bias gradient

  template <class Part>
  __device__ void operator()(const Part& at) const {
    Packed<A, kPart<T>> total{};
    for (int64_t i = at.first; i < at.last; ++i) {
      const auto up = at.load(dy, i), in = at.load(h, i);
      typename Part::Elements down;
      for (int k = 0; k < kPart<T>; ++k) {
        down.v[k] = T(static_cast<A>(up.v[k]) * Gelu::df(static_cast<A>(in.v[k])));
        total.v[k] += static_cast<A>(down.v[k]);
      }
      at.store(dh, i, down);
    }
    if (parts) at.store_sums(parts, total);
  }
};

}  // namespace

void bias_gelu(const BiasGelu& to, const Tensor& x, const Tensor* bias) {
  constexpr int64_t kRows = 8;  // for a thread: the bias is read once for them
  const int64_t c = x.dim(-1);
  if (x.numel() == 0) return;
  with_floating(x.dtype(), "bias_gelu", [&](auto t) {
    using T = decltype(t);
    const BiasGeluForward<T> f{.x = x.device_data<T>(),
                               .bias = bias ? bias->device_data<T>() : nullptr,
                               .h = to.h.device_data<T>(),
                               .y = to.y.device_data<T>()};
    for_columns<T>(context(x), "bias_gelu", {x.numel() / c, static_cast<int>(c), kRows}, f, f.x, f.bias, f.h, f.y);
  });
}

void bias_gelu_backward(const Tensor& dh, const Tensor& dy, const Tensor& h, const Tensor* dbias) {
  const int64_t c = h.dim(-1), n = c == 0 ? 0 : h.numel() / c;
  with_floating(h.dtype(), "bias_gelu_backward", [&](auto t) {
    using T = decltype(t);
    using A = Accumulate<T>;
    const Tensor parts = dbias ? parts_for<A>(h, n, c) : Tensor();
    const BiasGeluBackward<T> f{.dy = dy.device_data<T>(),
                                .h = h.device_data<T>(),
                                .dh = dh.device_data<T>(),
                                .parts = dbias ? parts.device_data<A>() : nullptr};
    for_columns<T>(context(h), "bias_gelu_backward", {n, static_cast<int>(c), kRowsTogether}, f, f.dy, f.h, f.dh);
    if (dbias) add_parts<A>("bias_gelu_backward", *dbias, parts);
  });
}

}  // namespace tessera::cuda
