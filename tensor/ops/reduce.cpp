// CPU sums: threads split the outputs, never the terms of one sum.
#include "tensor/ops/reduce.h"

#include <algorithm>
#include <cstdint>
#include <vector>

#include "tensor/cpu/loops.h"
#include "tensor/cpu/token_tree.h"
#include "tensor/math.h"
#include "tensor/ops/matmul/leaves.h"

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

void sum_tokens_on_cpu(const Tensor& out, const Tensor& rows, const cpu::TokenRows& tokens) {
  const int64_t c = rows.dim(1);
  with_floating(rows.dtype(), "sum_rows", [&]<class T>(T) {
    with_floating(out.dtype(), "sum_rows", [&]<class U>(U) {
      using A = Accumulate<T>;
      constexpr int64_t kStrip = 64;
      using Tree = cpu::TokenTree<A, 1, kStrip>;
      const T* const in = rows.data<T>();
      U* const to = out.data<U>();
      cpu::parallel_for(c, kStrip, [=](int64_t begin, int64_t end) {
        for (int64_t j0 = begin; j0 < end; j0 += kStrip) {
          const int64_t width = std::min(kStrip, end - j0);
          const auto add = [=](typename Tree::Sums& sums, int64_t i) {
            const T* const row = in + i * c + j0;
            for (int64_t j = 0; j < width; ++j) sums[0][j] += static_cast<A>(row[j]);
          };
          Tree::run(tokens, width, add, [=](const typename Tree::Sums& sums) {
            for (int64_t j = 0; j < width; ++j) to[j0 + j] = static_cast<U>(sums[0][j]);
          });
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
  const auto on_cpu = [&] {
    if (!adds_by_leaves(x)) return sum_rows_on_cpu(out, rows);
    const int64_t tokens = x.ndim() > 1 ? std::max<int64_t>(x.dim(-2), 1) : 1;
    sum_tokens_on_cpu(out, rows, {rows.dim(0) / tokens, tokens});
  };
  on_device(x.device(), on_cpu, [&] { cuda::sum_rows(out, rows); });
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

}  // namespace tessera
