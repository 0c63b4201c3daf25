// Rows on their way to experts and back on a GPU. A thread has 16 bytes of a row; sums are added in the order of
// choices, as on the CPU. The gradient of a weight is a sum along a row (tensor/cuda/rows.cuh).
#include "tensor/cuda/columns.cuh"
#include "tensor/ops/experts/route.h"

namespace tessera::cuda {
namespace {

template <class T>
struct Rowed {
  T* rows;
  const int32_t* place;  // (tokens, k)
  int k;
};

template <class T, bool kWhole>
__global__ void dispatch_kernel(Rowed<T> to, const T* x, Columns choices) {
  const ColumnThread at = column_thread<T>(choices);
  if (at.first >= choices.rows) return;
  const int64_t c = choices.length, row = to.place[at.first];
  if (row < 0) return;
  const auto part = load_part<kWhole>(x + at.first / to.k * c, at.j, choices.length);
  store_part<kWhole>(to.rows + row * c, at.j, choices.length, part);
}

template <class T, bool kWhole>
__global__ void combine_kernel(Rowed<const T> from, const Accumulate<T>* weights, T* y, Columns tokens) {
  const ColumnThread at = column_thread<T>(tokens);
  if (at.first >= tokens.rows) return;
  const int64_t c = tokens.length, first = at.first * from.k;
  Accumulate<T> sums[kPart<T>] = {};
#pragma unroll 4
  for (int j = 0; j < from.k; ++j) {
    const int64_t row = from.place[first + j];
    if (row < 0) continue;
    const Accumulate<T> w = weights ? weights[first + j] : Accumulate<T>(1);
    const auto part = load_part<kWhole>(from.rows + row * c, at.j, tokens.length);
    for (int i = 0; i < kPart<T>; ++i) sums[i] += w * static_cast<Accumulate<T>>(part.v[i]);
  }
  Packed<T, kPart<T>> part;
  for (int i = 0; i < kPart<T>; ++i) part.v[i] = static_cast<T>(sums[i]);
  store_part<kWhole>(y + at.first * c, at.j, tokens.length, part);
}

template <class T>
struct CombineBackward {
  Rowed<T> to;
  const T *dy, *rows;
  const Accumulate<T>* weights;
  Accumulate<T>* dweights;
  Rows choices;
};

template <class T, bool kWhole>
__global__ __launch_bounds__(kRowThreads) void combine_backward_kernel(CombineBackward<T> f) {
  using A = Accumulate<T>;
  const RowThread at = row_thread(f.choices);
  if (at.row >= f.choices.count) return;
  const int n = f.choices.length;
  const int64_t row = f.to.place[at.row];
  A sum = 0;
  if (row >= 0) {  // for all threads of the row
    const A w = f.weights[at.row];
    T* const to = f.to.rows + row * n;
    const HeldRow<T, kWhole> g(f.dy + at.row / f.to.k * n, at, n), in(f.rows + row * n, at, n);
    each_part(
        at, n,
        [&](int j, const auto& up, const auto& of) {
          Packed<T, kPart<T>> down;
          for (int i = 0; i < kPart<T>; ++i) {
            down.v[i] = static_cast<T>(w * static_cast<A>(up.v[i]));
            sum += static_cast<A>(up.v[i]) * static_cast<A>(of.v[i]);
          }
          store_part<kWhole>(to, j, n, down);
        },
        g, in);
    sum = row_sum(at, sum);
  }
  if (at.thread == 0) f.dweights[at.row] = sum;
}

}  // namespace

void dispatch_rows(const Tensor& rows, const Tensor& x, const Tensor& place) {
  if (rows.numel() == 0) return;
  with_floating(x.dtype(), "dispatch_rows", [&](auto t) {
    using T = decltype(t);
    const Rowed<T> to{rows.device_data<T>(), place.device_data<int32_t>(), static_cast<int>(place.dim(1))};
    const Columns choices{place.numel(), static_cast<int>(x.dim(-1))};
    const T* const from = x.device_data<T>();
    const auto queue = [&](auto whole) {
      launch(context(x), "dispatch_rows", choices.grid<T>(), dispatch_kernel<T, decltype(whole)::value>, to, from,
             choices);
    };
    with_parts<T>(x.dim(-1), queue, from, to.rows);
  });
}

void combine_rows(const Tensor& y, const Tensor& rows, const Tensor& weights, const Tensor& place) {
  if (y.numel() == 0) return;
  with_floating(y.dtype(), "combine_rows", [&](auto t) {
    using T = decltype(t);
    using A = Accumulate<T>;
    const Rowed<const T> from{rows.device_data<T>(), place.device_data<int32_t>(), static_cast<int>(place.dim(1))};
    const Columns tokens{y.dim(0), static_cast<int>(y.dim(-1))};
    const A* const w = weights.defined() ? weights.device_data<A>() : nullptr;
    T* const to = y.device_data<T>();
    const auto queue = [&](auto whole) {
      launch(context(y), "combine_rows", tokens.grid<T>(), combine_kernel<T, decltype(whole)::value>, from, w, to,
             tokens);
    };
    with_parts<T>(y.dim(-1), queue, from.rows, to);
  });
}

void combine_rows_backward(const CombineGrads& out, const Tensor& dy, const Tensor& rows, const Tensor& weights,
                           const Tensor& place) {
  with_floating(dy.dtype(), "combine_rows_backward", [&](auto t) {
    using T = decltype(t);
    using A = Accumulate<T>;
    const CombineBackward<T> f{
        .to = {out.rows.device_data<T>(), place.device_data<int32_t>(), static_cast<int>(place.dim(1))},
        .dy = dy.device_data<T>(),
        .rows = rows.device_data<T>(),
        .weights = weights.device_data<A>(),
        .dweights = out.weights.device_data<A>(),
        .choices = rows_of<T>(place.numel(), dy.dim(-1))};
    const auto queue = [&](auto whole) {
      launch(context(dy), "combine_rows_backward", f.choices.grid(), combine_backward_kernel<T, decltype(whole)::value>,
             f);
    };
    with_parts<T>(dy.dim(-1), queue, f.dy, f.rows, f.to.rows);
  });
}

}  // namespace tessera::cuda
