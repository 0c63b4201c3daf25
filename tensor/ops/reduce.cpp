// Threads split the outputs, never the terms of one sum.
#include "tensor/ops/reduce.h"

#include <limits>

#include "tensor/cpu/loops.h"
#include "tensor/math.h"

namespace tessera {

namespace {

void sum_rows_on_cpu(const Tensor& out, const Tensor& rows) {
  const int64_t n = rows.dim(0), c = rows.dim(1);
  with_floating(rows.dtype(), "sum_rows", [&]<class T>(T) {
    with_floating(out.dtype(), "sum_rows", [&]<class U>(U) {
      using A = Accumulate<T>;
      const T* const in = rows.data<T>();
      U* const to = out.data<U>();
      constexpr int64_t kStrip = 64;  // columns summed at a time, in registers or L1
      cpu::parallel_for(c, kStrip, [=](int64_t begin, int64_t end) {
        for (int64_t j0 = begin; j0 < end; j0 += kStrip) {
          const int64_t width = std::min(kStrip, end - j0);
          A total[kStrip] = {};
          for (int64_t i = 0; i < n; ++i) {
            const T* const row = in + i * c + j0;
            if (width == kStrip) {
              for (int64_t j = 0; j < kStrip; ++j) total[j] += static_cast<A>(row[j]);
            } else {
              for (int64_t j = 0; j < width; ++j) total[j] += static_cast<A>(row[j]);
            }
          }
          for (int64_t j = 0; j < width; ++j) to[j0 + j] = static_cast<U>(total[j]);
        }
      });
    });
  });
}

void sum_on_cpu(const Tensor& out, const Tensor& flat) {
  const int64_t n = flat.numel();
  with_floating(flat.dtype(), "sum", [&]<class T>(T) {
    const T* const in = flat.data<T>();
    constexpr int64_t kBlock = 4096;
    std::vector<double> partial(static_cast<size_t>((n + kBlock - 1) / kBlock));
    cpu::parallel_for(n, kBlock, [&](int64_t begin, int64_t end) {
      for (int64_t b = begin; b < end; b += kBlock) {
        double total = 0;
        for (int64_t i = b; i < std::min(end, b + kBlock); ++i)
          total += static_cast<double>(static_cast<Accumulate<T>>(in[i]));
        partial[static_cast<size_t>(b / kBlock)] = total;
      }
    });
    double total = 0;
    for (double p : partial) total += p;
    *out.data<T>() = T(static_cast<Accumulate<T>>(total));
  });
}

void sum_to_on_cpu(const Tensor& out, const Tensor& x) {
  const Shape& shape = out.shape();
  with_floating(x.dtype(), "sum_to", [&]<class T>(T) {
    using A = Accumulate<T>;
    const Tensor in = x.contiguous();
    std::vector<A> total(static_cast<size_t>(shape.numel()), A(0));
    const Shape strides = [&] {  // of the output by dims of x: 0 for summed dims
      Shape s = x.shape();
      const Shape own = contiguous_strides(shape);
      for (int i = 0; i < x.ndim(); ++i) {
        const int at = i - (x.ndim() - shape.ndim());
        s[i] = at < 0 || shape[at] == 1 ? 0 : own[at];
      }
      return s;
    }();
    const T* const p = in.data<T>();
    for (int64_t i = 0; i < in.numel(); ++i) {
      int64_t rest = i, to = 0;
      for (int d = x.ndim() - 1; d >= 0; --d) {
        to += rest % x.shape()[d] * strides[d];
        rest /= x.shape()[d];
      }
      total[static_cast<size_t>(to)] += static_cast<A>(p[i]);
    }
    for (int64_t i = 0; i < out.numel(); ++i) out.data<T>()[i] = T(total[static_cast<size_t>(i)]);
  });
}

}  // namespace

void sum_rows(Tensor& out, const Tensor& x) {
  const Tensor rows = x.contiguous().flat_rows();
  out.check_size(rows.dim(1));
  on_device(
      x.device(), [&] { sum_rows_on_cpu(out, rows); }, [&] { cuda::sum_rows(out, rows); });
}

void sum_partials(Tensor& out, const Tensor& partials) {
  on_device(
      partials.device(), [] { throw Error("[sum_partials] expected partial sums on a GPU"); },
      [&] { cuda::sum_partials(out, partials); });
}

Tensor sum(const Tensor& x) {
  const Tensor flat = x.contiguous().reshape({1, x.numel()});
  Tensor out = x.make(Shape{});
  on_device(
      x.device(), [&] { sum_on_cpu(out, flat); }, [&] { cuda::sums("sum", out, flat); });
  return out;
}

Tensor sum_to(const Tensor& x, const Shape& shape) {
  if (x.shape() == shape) return x;
  if (!(broadcast(x.shape(), shape, "sum_to") == x.shape()))
    throw Error("[sum_to] " + x.describe() + " is not a broadcast of " + shape.str());
  // If only leading dims are summed, this is a sum over rows, as for bias gradients.
  Shape tail;
  for (int i = x.ndim() - shape.ndim(); i < x.ndim(); ++i) tail.push_back(x.shape()[i]);
  Tensor out = x.make(shape);
  if (tail == shape) {
    Tensor flat = out.reshape({-1});
    sum_rows(flat, x.contiguous().reshape({-1, shape.numel()}));
    return out;
  }
  on_device(
      x.device(), [&] { sum_to_on_cpu(out, x); }, [&] { cuda::sum_to(out, x); });
  return out;
}

// Shifted by the row's maximum so that no exponential overflows.

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

// Checks the operands; runs `row` on the CPU, or cuda::softmax() with `of`, on contiguous operands.
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
