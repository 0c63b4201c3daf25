// Rows on their way to experts and back. Threads split the tokens; sums along a row go through fixed lanes.
#include <algorithm>
#include <string>

#include "tensor/cpu/lanes.h"
#include "tensor/ops/experts/cpu/host.h"
#include "tensor/ops/experts/route.h"

namespace tessera {
namespace {

void dispatch_on_cpu(const Tensor& rows, const Tensor& x, const Tensor& places) {
  const int64_t k = places.dim(1), bytes = x.dim(-1) * size_of(x.dtype());
  const int32_t* const place = places.data<int32_t>();
  cpu::split(x.dim(0), tokens_together(x.dim(-1)), [&](int64_t begin, int64_t end) {
    for (int64_t i = begin * k; i < end * k; ++i)
      if (place[i] >= 0) std::copy_n(x.raw() + i / k * bytes, bytes, rows.raw() + place[i] * bytes);
  });
}

// y[t] = sum over j of weight(t, j) rows[place[t, j]].
template <class T, class F>
void sum_choices(const Tensor& y, const Tensor& rows, const Tensor& places, const F& weight) {
  using A = Accumulate<T>;
  const int64_t k = places.dim(1), c = y.dim(-1);
  const T* const in = rows.data<T>();
  T* const out = y.data<T>();
  const int32_t* const place = places.data<int32_t>();
  constexpr int64_t kTogether = 256;  // columns
  cpu::parallel_for(y.dim(0), tokens_together(c), [=](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t)
      for (int64_t first = 0; first < c; first += kTogether) {
        const int64_t width = std::min(kTogether, c - first);
        A sum[kTogether] = {};
        for (int64_t j = 0; j < k; ++j) {
          const int64_t row = place[t * k + j];
          if (row < 0) continue;
          const A w = weight(t * k + j);
          const T* const from = in + row * c + first;
          for (int64_t i = 0; i < width; ++i) sum[i] += w * static_cast<A>(from[i]);
        }
        for (int64_t i = 0; i < width; ++i) out[t * c + first + i] = static_cast<T>(sum[i]);
      }
  });
}

void combine_on_cpu(const Tensor& y, const Tensor& rows, const Tensor& weights, const Tensor& places) {
  with_floating(y.dtype(), "combine_rows", [&](auto t) {
    using T = decltype(t);
    using A = Accumulate<T>;
    if (!weights.defined()) return sum_choices<T>(y, rows, places, [](int64_t) { return A(1); });
    const A* const w = weights.data<A>();
    sum_choices<T>(y, rows, places, [w](int64_t i) { return w[i]; });
  });
}

void combine_backward_on_cpu(const CombineGrads& out, const Tensor& dy, const Tensor& rows, const Tensor& weights,
                             const Tensor& places) {
  const int64_t k = places.dim(1), c = dy.dim(-1);
  with_floating(dy.dtype(), "combine_rows_backward", [&](auto t) {
    using T = decltype(t);
    using A = Accumulate<T>;
    const T *const given = dy.data<T>(), *const in = rows.data<T>();
    T* const drows = out.rows.data<T>();
    A* const dw = out.weights.data<A>();
    const A* const w = weights.data<A>();
    const int32_t* const place = places.data<int32_t>();
    cpu::parallel_for(dy.dim(0), tokens_together(c), [=](int64_t begin, int64_t end) {
      for (int64_t i = begin * k; i < end * k; ++i) {
        dw[i] = 0;
        if (place[i] < 0) continue;
        const T *const g = given + i / k * c, *const row = in + place[i] * c;
        T* const to = drows + place[i] * c;
        const A weight = w[i];
        for (int64_t j = 0; j < c; ++j) to[j] = static_cast<T>(weight * static_cast<A>(g[j]));
        dw[i] = cpu::lane_sum<A>(c, [=](int64_t j) { return static_cast<A>(g[j]) * static_cast<A>(row[j]); });
      }
    });
  });
}

Tensor combined(const Tensor& rows_any, const Tensor& weights, const Tensor& places) {
  const Tensor rows = rows_any.contiguous();
  Tensor y = rows.make({places.dim(0), rows.dim(-1)});
  on_device(
      y.device(), [&] { combine_on_cpu(y, rows, weights, places); },
      [&] { cuda::combine_rows(y, rows, weights, places); });
  return y;
}

}  // namespace

Tensor dispatch_rows(const Tensor& x_any, const Routed& routed) {
  const Tensor x = x_any.contiguous();
  Tensor rows = x.make({routed.rows, x.dim(-1)});
  on_device(
      x.device(), [&] { dispatch_on_cpu(rows, x, routed.place); }, [&] { cuda::dispatch_rows(rows, x, routed.place); });
  return rows;
}

Tensor dispatch_rows_backward(const Tensor& drows, const Routed& routed) {
  return combined(drows, Tensor(), routed.place);
}

Tensor combine_rows(const Tensor& rows, const Tensor& weights, const Routed& routed) {
  if (rows.dim(0) != routed.rows)
    throw Error("[combine_rows] found " + rows.describe() + "; expected the " + std::to_string(routed.rows) +
                " rows that were dealt out");
  return combined(rows, weights.contiguous(), routed.place);
}

CombineGrads combine_rows_backward(const Tensor& dy_any, const Tensor& rows_any, const Tensor& weights_any,
                                   const Routed& routed) {
  const Tensor dy = dy_any.contiguous(), rows = rows_any.contiguous(), weights = weights_any.contiguous();
  CombineGrads out{rows.make(rows.shape()), weights.make(weights.shape())};
  on_device(
      dy.device(), [&] { combine_backward_on_cpu(out, dy, rows, weights, routed.place); },
      [&] { cuda::combine_rows_backward(out, dy, rows, weights, routed.place); });
  return out;
}

}  // namespace tessera
