// Rows on their way to experts and back on a GPU. A thread has 16 bytes of a row; sums are added in the order of
// choices, as on the CPU. The gradient of a weight is a sum along a row (tensor/cuda/rows.cuh).
#include "tensor/cuda/column_kernel.cuh"
#include "tensor/ops/experts/route.h"

namespace tessera::cuda {
namespace {

template <class T>
struct Rowed {
  T* rows;
  const int32_t* place;  // (tokens, k)
  int k;
};

template <class T>
struct Dispatch {
  Rowed<T> to;
  const T* x;

  template <class Part>
  __device__ void operator()(const Part& at) const {
    const int64_t row = to.place[at.first];
    if (row >= 0) at.store(to.rows, row, at.load(x, at.first / to.k));
  }
};

template <class T>
struct Combine {
  using A = Accumulate<T>;
  Rowed<const T> from;
  const A* weights;  // null: 1
  T* y;

  template <class Part>
  __device__ void operator()(const Part& at) const {
    const int64_t first = at.first * from.k;
    A sums[kPart<T>] = {};
#pragma unroll 4
    for (int j = 0; j < from.k; ++j) {
      const int64_t row = from.place[first + j];
      if (row < 0) continue;
      const A w = weights ? weights[first + j] : A(1);
      const auto part = at.load(from.rows, row);
      for (int i = 0; i < kPart<T>; ++i) sums[i] += w * static_cast<A>(part.v[i]);
    }
    typename Part::Elements part;
    for (int i = 0; i < kPart<T>; ++i) part.v[i] = static_cast<T>(sums[i]);
    at.store(y, at.first, part);
  }
};

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
    const Dispatch<T> f{{rows.device_data<T>(), place.device_data<int32_t>(), static_cast<int>(place.dim(1))},
                        x.device_data<T>()};
    for_columns<T>(context(x), "dispatch_rows", {place.numel(), static_cast<int>(x.dim(-1))}, f, f.x, f.to.rows);
  });
}

void combine_rows(const Tensor& y, const Tensor& rows, const Tensor& weights, const Tensor& place) {
  if (y.numel() == 0) return;
  with_floating(y.dtype(), "combine_rows", [&](auto t) {
    using T = decltype(t);
    using A = Accumulate<T>;
    const Combine<T> f{{rows.device_data<T>(), place.device_data<int32_t>(), static_cast<int>(place.dim(1))},
                       weights.defined() ? weights.device_data<A>() : nullptr,
                       y.device_data<T>()};
    for_columns<T>(context(y), "combine_rows", {y.dim(0), static_cast<int>(y.dim(-1))}, f, f.from.rows, f.y);
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
