// Softmax on a GPU: a row stays in the registers of its threads from the one read to the one write.
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

template <SoftmaxOp kOp, class T, bool kWhole>
__global__ __launch_bounds__(kRowThreads) void softmax_kernel(Softmax<T> f) {
  using A = Accumulate<T>;
  const RowThread at = row_thread(f.rows);
  if (at.row >= f.rows.count) return;
  const int n = f.rows.length;
  HeldRow<T, kWhole> x(f.a + at.row * n, at, n);
  A max = -std::numeric_limits<A>::infinity(), sum = 0;
  each_part(
      at, n,
      [&](int j, const auto& part) {
        each_in_part<kWhole, T>(j, n, [&](int k) { max = std::max(max, static_cast<A>(part.v[k])); });
      },
      x);
  max = row_top(at, max);
  each_part(
      at, n,
      [&](int j, const auto& part) {
        each_in_part<kWhole, T>(j, n, [&](int k) { sum += math::exp(static_cast<A>(part.v[k]) - max); });
      },
      x);
  sum = row_sum(at, sum);
  const A last = kOp == SoftmaxOp::softmax ? A(1) / sum : math::log(sum);
  each_part(
      at, n,
      [&](int j, const auto& part) {
        Packed<T, kPart<T>> y;
        for (int k = 0; k < kPart<T>; ++k) {
          const A v = static_cast<A>(part.v[k]) - max;
          y.v[k] = kOp == SoftmaxOp::softmax ? T(math::exp(v) * last) : T(v - last);
        }
        store_part<kWhole>(f.out + at.row * n, j, n, y);
      },
      x);
}

// a is dy, b the forward's result.
template <SoftmaxOp kOp, class T, bool kWhole>
__global__ __launch_bounds__(kRowThreads) void softmax_backward_kernel(Softmax<T> f) {
  using A = Accumulate<T>;
  constexpr bool kLog = kOp == SoftmaxOp::log_backward;
  const RowThread at = row_thread(f.rows);
  if (at.row >= f.rows.count) return;
  const int n = f.rows.length;
  HeldRow<T, kWhole> dy(f.a + at.row * n, at, n), y(f.b + at.row * n, at, n);
  A sum = 0;
  each_part(
      at, n,
      [&](int j, const auto& g, const auto& p) {
        each_in_part<kWhole, T>(j, n, [&](int k) {
          sum += kLog ? static_cast<A>(g.v[k]) : static_cast<A>(g.v[k]) * static_cast<A>(p.v[k]);
        });
      },
      dy, y);
  sum = row_sum(at, sum);
  each_part(
      at, n,
      [&](int j, const auto& g, const auto& p) {
        Packed<T, kPart<T>> dx;
        for (int k = 0; k < kPart<T>; ++k) {
          const A up = static_cast<A>(g.v[k]), of = static_cast<A>(p.v[k]);
          dx.v[k] = kLog ? T(up - math::exp(of) * sum) : T(of * (up - sum));
        }
        store_part<kWhole>(f.out + at.row * n, j, n, dx);
      },
      dy, y);
}

template <SoftmaxOp kOp, class T, bool kWhole>
constexpr auto kernel_of() {
  if constexpr (kOp == SoftmaxOp::softmax || kOp == SoftmaxOp::log_softmax)
    return &softmax_kernel<kOp, T, kWhole>;
  else
    return &softmax_backward_kernel<kOp, T, kWhole>;
}

template <SoftmaxOp kOp>
void run(const Tensor& out, const Tensor& a, const Tensor& b) {
  const int64_t n = a.dim(-1);
  if (a.numel() == 0) return;
  with_floating(a.dtype(), name_of(kOp), [&](auto t) {
    using T = decltype(t);
    const Softmax<T> f{a.device_data<T>(), b.device_data<T>(), out.device_data<T>(), rows_of<T>(a.numel() / n, n)};
    const auto queue = [&](auto whole) {
      launch(context(a), name_of(kOp), f.rows.grid(), kernel_of<kOp, T, decltype(whole)::value>(), f);
    };
    with_parts<T>(n, queue, f.a, f.b, f.out);
  });
}

}  // namespace

void softmax(SoftmaxOp op, const Tensor& out, const Tensor& a, const Tensor& b) {
  switch (op) {
    case SoftmaxOp::softmax:
      return run<SoftmaxOp::softmax>(out, a, b);
    case SoftmaxOp::log_softmax:
      return run<SoftmaxOp::log_softmax>(out, a, b);
    case SoftmaxOp::backward:
      return run<SoftmaxOp::backward>(out, a, b);
    case SoftmaxOp::log_backward:
      return run<SoftmaxOp::log_backward>(out, a, b);
  }
}

}  // namespace tessera::cuda
