// CPU softmax: threads split the rows.
#include "tensor/ops/softmax.h"

#include <cstdint>
#include <limits>
#include <string>

#include "tensor/cpu/loops.h"
#include "tensor/math.h"

namespace tessera {

namespace {

// Calls row(a + i n, b + i n, out + i n, n) for every row.
template <class Row>
void by_rows(const Tensor& out, const Tensor& a, const Tensor& b, const Row& row) {
  const int64_t n = a.dim(-1), rows = n == 0 ? 0 : a.numel() / n;
  with_floating(a.dtype(), "softmax", [&]<class T>(T) {
    const T *const pa = a.data<T>(), *const pb = b.data<T>();
    T* const to = out.data<T>();
    cpu::for_rows(rows, n, [=](int64_t i) { row(pa + i * n, pb + i * n, to + i * n, n); });
  });
}

// Checks the operands and makes them contiguous; then calls `row` on the CPU, or cuda::softmax() with `of` on a GPU.
template <class Row>
Tensor run(SoftmaxOp of, const Tensor& a_any, const Tensor& b_any, const Row& row) {
  const char* const op = to_string(of);
  if (a_any.ndim() == 0 || !(a_any.shape() == b_any.shape()) || a_any.dtype() != b_any.dtype())
    throw Error(std::string("[") + op + "] operands are " + a_any.describe() + " and " + b_any.describe());
  const Tensor a = a_any.contiguous(), b = b_any.contiguous();
  Tensor out = a.make(a.shape());
  on_device(
      a.device(), [&] { by_rows(out, a, b, row); }, [&] { cuda::softmax(of, out, a, b); });
  return out;
}

template <class A, class T>
inline A row_max(const T* x, int64_t n) {
  return cpu::lane_max<A>(n, -std::numeric_limits<A>::infinity(), [=](int64_t j) { return static_cast<A>(x[j]); });
}
template <class A, class T>
inline A row_exp_sum(const T* x, int64_t n, A max) {
  return cpu::lane_sum<A>(n, [=](int64_t j) { return math::exp(static_cast<A>(x[j]) - max); });
}

}  // namespace

Tensor softmax(const Tensor& x) {
  return run(SoftmaxOp::softmax, x, x, []<class T>(const T* in, const T*, T* out, int64_t n) {
    using A = Accumulate<T>;
    const A max = row_max<A>(in, n), inverse = A(1) / row_exp_sum<A>(in, n, max);
    for (int64_t j = 0; j < n; ++j) out[j] = T(math::exp(static_cast<A>(in[j]) - max) * inverse);
  });
}

Tensor log_softmax(const Tensor& x) {
  return run(SoftmaxOp::log_softmax, x, x, []<class T>(const T* in, const T*, T* out, int64_t n) {
    using A = Accumulate<T>;
    const A max = row_max<A>(in, n), log_sum = math::log(row_exp_sum<A>(in, n, max));
    for (int64_t j = 0; j < n; ++j) out[j] = T((static_cast<A>(in[j]) - max) - log_sum);
  });
}

Tensor softmax_backward(const Tensor& dy, const Tensor& y) {
  return run(SoftmaxOp::backward, dy, y, []<class T>(const T* g, const T* p, T* out, int64_t n) {
    using A = Accumulate<T>;
    const A dot = cpu::lane_sum<A>(n, [=](int64_t j) { return static_cast<A>(g[j]) * static_cast<A>(p[j]); });
    for (int64_t j = 0; j < n; ++j) out[j] = T(static_cast<A>(p[j]) * (static_cast<A>(g[j]) - dot));
  });
}

Tensor log_softmax_backward(const Tensor& dy, const Tensor& y) {
  return run(SoftmaxOp::log_backward, dy, y, []<class T>(const T* g, const T* log_p, T* out, int64_t n) {
    using A = Accumulate<T>;
    const A total = cpu::lane_sum<A>(n, [=](int64_t j) { return static_cast<A>(g[j]); });
    for (int64_t j = 0; j < n; ++j) out[j] = T(static_cast<A>(g[j]) - math::exp(static_cast<A>(log_p[j])) * total);
  });
}

}  // namespace tessera
