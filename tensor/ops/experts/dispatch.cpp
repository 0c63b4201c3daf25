// Rows on their way to experts and back. Threads split the tokens; sums along a row go through fixed lanes.
#include <algorithm>

#include "tensor/cpu/lanes.h"
#include "tensor/ops/experts/cpu/host.h"
#include "tensor/ops/experts/route.h"

namespace tessera {

Tensor dispatch_rows(const Tensor& x_any, const Routed& routed) {
  check_on_host("dispatch_rows", x_any);
  const Tensor x = x_any.contiguous();
  const int64_t k = routed.place.dim(1), bytes = x.dim(-1) * size_of(x.dtype());
  Tensor rows = x.make({routed.rows, x.dim(-1)});
  const int32_t* const place = routed.place.data<int32_t>();
  cpu::split(x.dim(0), tokens_together(x.dim(-1)), [&](int64_t begin, int64_t end) {
    for (int64_t i = begin * k; i < end * k; ++i)
      if (place[i] >= 0) std::copy_n(x.raw() + i / k * bytes, bytes, rows.raw() + place[i] * bytes);
  });
  return rows;
}

namespace {

// y[t] = sum over j of weight(t, j) rows[place[t, j]].
template <class T, class F>
void sum_choices(const Tensor& y, const Tensor& rows, const Routed& routed, const F& weight) {
  using A = Accumulate<T>;
  const int64_t k = routed.place.dim(1), c = y.dim(-1);
  const T* const in = rows.data<T>();
  T* const out = y.data<T>();
  const int32_t* const place = routed.place.data<int32_t>();
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

}  // namespace

Tensor dispatch_rows_backward(const Tensor& drows_any, const Routed& routed) {
  const Tensor drows = drows_any.contiguous();
  Tensor dx = drows.make({routed.place.dim(0), drows.dim(-1)});
  with_floating(dx.dtype(), "dispatch_rows_backward", [&](auto t) {
    using T = decltype(t);
    sum_choices<T>(dx, drows, routed, [](int64_t) { return Accumulate<T>(1); });
  });
  return dx;
}

Tensor combine_rows(const Tensor& rows_any, const Tensor& weights, const Routed& routed) {
  check_on_host("combine_rows", rows_any);
  if (rows_any.dim(0) != routed.rows)
    throw Error("[combine_rows] found " + rows_any.describe() + "; expected the " + std::to_string(routed.rows) +
                " rows that were dealt out");
  const Tensor rows = rows_any.contiguous();
  Tensor y = rows.make({routed.place.dim(0), rows.dim(-1)});
  with_floating(y.dtype(), "combine_rows", [&](auto t) {
    using T = decltype(t);
    const Accumulate<T>* const w = weights.data<Accumulate<T>>();
    sum_choices<T>(y, rows, routed, [w](int64_t i) { return w[i]; });
  });
  return y;
}

CombineGrads combine_rows_backward(const Tensor& dy_any, const Tensor& rows_any, const Tensor& weights,
                                   const Routed& routed) {
  const Tensor dy = dy_any.contiguous(), rows = rows_any.contiguous();
  CombineGrads out{rows.make(rows.shape()), weights.make(weights.shape())};
  const int64_t k = routed.place.dim(1), c = dy.dim(-1);
  with_floating(dy.dtype(), "combine_rows_backward", [&](auto t) {
    using T = decltype(t);
    using A = Accumulate<T>;
    const T *const given = dy.data<T>(), *const in = rows.data<T>();
    T* const drows = out.rows.data<T>();
    A* const dw = out.weights.data<A>();
    const A* const w = weights.data<A>();
    const int32_t* const place = routed.place.data<int32_t>();
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
  return out;
}

}  // namespace tessera
