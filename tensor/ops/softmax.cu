// GPU softmax: a row stays in its threads' registers between one read and one write.
#include <algorithm>
#include <array>
#include <cstdint>
#include <limits>

#include "tensor/cuda/rows.cuh"
#include "tensor/math.h"
#include "tensor/ops/softmax.h"

namespace tessera::cuda {

namespace {

template <class T>
struct Softmax {
  const T *a, *b;
  T* out;
  Rows rows;
};

template <SoftmaxOp kOp, class T, bool kVectorized>
__global__ __launch_bounds__(kRowThreads) void softmax_kernel(Softmax<T> f) {
  using A = Accumulate<T>;
  const RowThread at = row_thread(f.rows);
  if (at.row >= f.rows.count) return;
  const int n = f.rows.length;
  RegisterRow<T, kVectorized> x(f.a + at.row * n, at, n);
  A max = -std::numeric_limits<A>::infinity(), sum = 0;
  const auto find_top = [&](A v) { max = std::max(max, v); };
  each_element(at, n, find_top, x);
  max = row_top(at, max);
  const auto add = [&](A v) { sum += math::exp(v - max); };
  each_element(at, n, add, x);
  sum = row_sum(at, sum);
  const A last = kOp == SoftmaxOp::softmax ? A(1) / sum : math::log(sum);
  const auto store_y = [&](int j, const auto& packed) {
    Packed<T, kVecElems<T>> y;
    for (int k = 0; k < kVecElems<T>; ++k) {
      const A v = static_cast<A>(packed.v[k]) - max;
      y.v[k] = kOp == SoftmaxOp::softmax ? T(math::exp(v) * last) : T(v - last);
    }
    store_vector<kVectorized>(f.out + at.row * n, j, n, y);
  };
  each_vector(at, n, store_y, x);
}

template <SoftmaxOp kOp, class T, bool kVectorized>
__global__ __launch_bounds__(kRowThreads) void softmax_backward_kernel(Softmax<T> f) {
  using A = Accumulate<T>;
  constexpr bool kLog = kOp == SoftmaxOp::log_backward;
  const RowThread at = row_thread(f.rows);
  if (at.row >= f.rows.count) return;
  const int n = f.rows.length;
  RegisterRow<T, kVectorized> dy(f.a + at.row * n, at, n), y(f.b + at.row * n, at, n);
  A sum = 0;
  const auto add = [&](A g, A p) { sum += kLog ? g : g * p; };
  each_element(at, n, add, dy, y);
  sum = row_sum(at, sum);
  const auto store_dx = [&](int j, const auto& g, const auto& p) {
    Packed<T, kVecElems<T>> dx;
    for (int k = 0; k < kVecElems<T>; ++k) {
      const A up = static_cast<A>(g.v[k]), of = static_cast<A>(p.v[k]);
      dx.v[k] = kLog ? T(up - math::exp(of) * sum) : T(of * (up - sum));
    }
    store_vector<kVectorized>(f.out + at.row * n, j, n, dx);
  };
  each_vector(at, n, store_dx, dy, y);
}

template <SoftmaxOp kOp, class T, bool kVectorized>
constexpr auto select_kernel() {
  if constexpr (kOp == SoftmaxOp::softmax || kOp == SoftmaxOp::log_softmax)
    return &softmax_kernel<kOp, T, kVectorized>;
  else
    return &softmax_backward_kernel<kOp, T, kVectorized>;
}

}  // namespace

void softmax(SoftmaxOp op, const Tensor& out, const Tensor& a, const Tensor& b) {
  const int64_t n = a.dim(-1);
  if (a.numel() == 0) return;
  with_floating(a.dtype(), to_string(op), [&](auto t) {
    using T = decltype(t);
    using Of = SoftmaxOp;
    const Softmax<T> f{a.device_data<T>(), b.device_data<T>(), out.device_data<T>(),
                       partition_rows<T>(a.numel() / n, n)};
    constexpr std::array kVectorized{select_kernel<Of::softmax, T, true>(), select_kernel<Of::log_softmax, T, true>(),
                                     select_kernel<Of::backward, T, true>(),
                                     select_kernel<Of::log_backward, T, true>()},
        kParts{select_kernel<Of::softmax, T, false>(), select_kernel<Of::log_softmax, T, false>(),
               select_kernel<Of::backward, T, false>(), select_kernel<Of::log_backward, T, false>()};
    const auto& kernels = is_vectorizable<T>(n, f.a, f.b, f.out) ? kVectorized : kParts;
    launch(context(a), to_string(op), f.rows.grid(), kernels[static_cast<size_t>(op)], f);
  });
}

}  // namespace tessera::cuda
