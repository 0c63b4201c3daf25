// CPU norms: threads split the rows, and the gradients of gamma and beta by columns.
#include "tensor/ops/norm.h"

#include <algorithm>
#include <cstdint>
#include <map>
#include <string>

#include "tensor/cpu/loops.h"
#include "tensor/cpu/token_tree.h"
#include "tensor/math.h"
#include "tensor/ops/elementwise.h"
#include "tensor/ops/matmul/leaves.h"

namespace tessera {
namespace {

void check(const Tensor& x, const Tensor& gamma, const Tensor& beta) {
  const int64_t c = x.ndim() > 0 ? x.dim(-1) : 0;
  const auto fits = [&](const Tensor& w) { return w.ndim() == 1 && w.dim(0) == c && w.dtype() == x.dtype(); };
  if (!fits(gamma) || (beta.defined() && !fits(beta)))
    throw Error("[norm] x is " + x.describe() + "; gamma is " + gamma.describe() +
                (beta.defined() ? ", beta is " + beta.describe() : "") + "; expected " + std::to_string(c) +
                " elements of x's dtype");
}

template <class T>
void norm_row(const NormForward<T>& f, int64_t c, int64_t i) {
  using A = Accumulate<T>;
  const T* in = f.x + i * c;
  if (f.added) {
    const T* const other = f.added + i * c;
    T* const to = f.sum + i * c;
#pragma GCC ivdep
    for (int64_t j = 0; j < c; ++j) to[j] = T(static_cast<A>(in[j]) + static_cast<A>(other[j]));
    in = to;
  }
  const A inverse = A(1) / static_cast<A>(c);
  const A m = f.mean ? cpu::lane_sum<A>(c, [=](int64_t j) { return static_cast<A>(in[j]); }) * inverse : A(0);
  const A square = cpu::lane_sum<A>(c, [=](int64_t j) {
    const A d = static_cast<A>(in[j]) - m;
    return d * d;
  });
  const A r = A(1) / math::sqrt(square * inverse + f.eps);
  T* const out = f.y + i * c;
  const T *const gamma = f.gamma, *const beta = f.beta;
  if (beta) {
    for (int64_t j = 0; j < c; ++j)
      out[j] = T(math::fma((static_cast<A>(in[j]) - m) * r, static_cast<A>(gamma[j]), static_cast<A>(beta[j])));
  } else {
    for (int64_t j = 0; j < c; ++j) out[j] = T((static_cast<A>(in[j]) - m) * r * static_cast<A>(gamma[j]));
  }
  if (f.mean) f.mean[i] = m;
  f.rstd[i] = r;
}

void norm_on_cpu(const NormOperands& operands) {
  const int64_t c = operands.x.dim(-1), n = operands.x.numel() / std::max<int64_t>(c, 1);
  with_floating(operands.x.dtype(), "norm", [&]<class T>(T) {
    const NormForward<T> f = make_norm_forward<T>(operands);
    cpu::for_rows(n, c, [&f, c](int64_t i) { norm_row(f, c, i); });
  });
}

Normed run(NormOperands operands, const Tensor& gamma, const Tensor& beta, const NormOptions& options) {
  const Tensor& x = operands.x;
  check(x, gamma, beta);
  operands.gamma = gamma.contiguous();
  if (beta.defined()) operands.beta = beta.contiguous();
  const Shape rows = x.shape().first(x.ndim() - 1);
  operands.eps = options.eps;
  operands.out = {x.make(x.shape()), options.center ? x.make(rows, accum_dtype(x.dtype())) : Tensor(),
                  x.make(rows, accum_dtype(x.dtype()))};
  on_device(
      x.device(), [&] { norm_on_cpu(operands); }, [&] { cuda::norm(operands); });
  return operands.out;
}

template <class T>
void norm_backward_row(const NormBackward<T>& f, int64_t c, int64_t i) {
  using A = Accumulate<T>;
  const T *const g = f.dy + i * c, *const in = f.x + i * c, *const gamma = f.gamma;
  const A m = f.mean ? f.mean[i] : A(0), r = f.rstd[i], inverse = A(1) / static_cast<A>(c);
  const auto weighted = [=](int64_t j) { return static_cast<A>(g[j]) * static_cast<A>(gamma[j]); };
  const A along =
      cpu::lane_sum<A>(c, [=](int64_t j) { return weighted(j) * ((static_cast<A>(in[j]) - m) * r); }) * inverse;
  const A level = f.mean ? cpu::lane_sum<A>(c, weighted) * inverse : A(0);
  T* const out = f.dx + i * c;
  if (f.residual) {
    const T* const other = f.residual + i * c;
#pragma GCC ivdep
    for (int64_t j = 0; j < c; ++j) {
      const A xhat = (static_cast<A>(in[j]) - m) * r;
      out[j] = T(math::fma(r, weighted(j) - level - xhat * along, static_cast<A>(other[j])));
    }
  } else {
    for (int64_t j = 0; j < c; ++j) {
      const A xhat = (static_cast<A>(in[j]) - m) * r;
      out[j] = T(r * (weighted(j) - level - xhat * along));
    }
  }
}

void norm_backward_on_cpu(const NormBackwardOperands& operands) {
  const int64_t c = operands.x.dim(-1), n = operands.x.numel() / std::max<int64_t>(c, 1);
  with_floating(operands.x.dtype(), "norm_backward", [&]<class T>(T) {
    const NormBackward<T> f = make_norm_backward<T>(operands);
    cpu::for_rows(n, c, [&f, c](int64_t i) { norm_backward_row(f, c, i); });
  });
}

template <class T, class A>
void norm_sums_by_tokens(const NormBackward<T>& f, const cpu::TokenRows& rows, int64_t c, A* to_gamma, A* to_beta) {
  constexpr int64_t kStrip = 64;
  using Tree = cpu::TokenTree<A, 2, kStrip>;
  cpu::parallel_for(c, kStrip, [=](int64_t begin, int64_t end) {
    for (int64_t j0 = begin; j0 < end; j0 += kStrip) {
      const int64_t width = std::min(kStrip, end - j0);
      const auto add = [=](typename Tree::Sums& sums, int64_t i) {
        const T *const gi = f.dy + i * c + j0, *const xi = f.x + i * c + j0;
        const A m = f.mean ? f.mean[i] : A(0), r = f.rstd[i];
        for (int64_t j = 0; j < width; ++j) {
          const A d = static_cast<A>(gi[j]);
          sums[0][j] = math::fma(d, (static_cast<A>(xi[j]) - m) * r, sums[0][j]);
          sums[1][j] += d;
        }
      };
      Tree::run(rows, width, add, [=](const typename Tree::Sums& sums) {
        std::copy(sums[0], sums[0] + width, to_gamma + j0);
        std::copy(sums[1], sums[1] + width, to_beta + j0);
      });
    }
  });
}

void norm_sums_on_cpu(const NormSums& sums, const NormBackwardOperands& operands) {
  const Tensor& x = operands.x;
  const int64_t c = x.dim(-1), n = x.numel() / std::max<int64_t>(c, 1);
  const Tensor by_gamma = x.make({c}, accum_dtype(x.dtype())), by_beta = x.make({c}, accum_dtype(x.dtype()));
  with_floating(x.dtype(), "norm_weight_grads", [&]<class T>(T) {
    using A = Accumulate<T>;
    const NormBackward<T> f = make_norm_backward<T>(operands);
    A *const to_gamma = by_gamma.data<A>(), *const to_beta = by_beta.data<A>();
    if (adds_by_leaves(x)) {
      const int64_t tokens = x.ndim() > 1 ? std::max<int64_t>(x.dim(-2), 1) : 1;
      return norm_sums_by_tokens(f, {n / tokens, tokens}, c, to_gamma, to_beta);
    }
    constexpr int64_t kStrip = 64;  // columns at a time, so that their sums stay in L1
    cpu::parallel_for(c, kStrip, [=](int64_t begin, int64_t end) {
      for (int64_t j0 = begin; j0 < end; j0 += kStrip) {
        const int64_t width = std::min(kStrip, end - j0);
        A total[kStrip] = {}, plain[kStrip] = {};
        for (int64_t i = 0; i < n; ++i) {
          const T *const gi = f.dy + i * c + j0, *const xi = f.x + i * c + j0;
          const A m = f.mean ? f.mean[i] : A(0), r = f.rstd[i];
          for (int64_t j = 0; j < width; ++j) {
            const A d = static_cast<A>(gi[j]);
            total[j] = math::fma(d, (static_cast<A>(xi[j]) - m) * r, total[j]);
            plain[j] += d;
          }
        }
        std::copy(total, total + width, to_gamma + j0);
        std::copy(plain, plain + width, to_beta + j0);
      }
    });
  });
  for (const auto& [sum, made] : {std::pair{sums.gamma, by_gamma}, {sums.beta, by_beta}}) {
    Tensor to = sum.to;
    if (sum.adds)
      add_(to, made.to(to.dtype()));
    else if (to.defined())
      to.copy_from(made);
  }
}

}  // namespace

Normed norm(const Tensor& x_any, const Tensor& gamma, const Tensor& beta, const NormOptions& options) {
  const Tensor x = x_any.contiguous();
  return run({.x = x}, gamma, beta, options);
}

AddNormed add_norm(const Tensor& x_any, Tensor&& y_any, const Tensor& gamma, const Tensor& beta,
                   const NormOptions& options) {
  if (!(x_any.shape() == y_any.shape()) || x_any.dtype() != y_any.dtype())
    throw Error("[add_norm] x is " + x_any.describe() + ", y is " + y_any.describe() +
                "; expected equal shapes and dtypes");
  const Tensor x = x_any.contiguous(), y = y_any.contiguous();
  y_any = Tensor();
  Tensor sum = y.unique() ? y : x.make(x.shape());
  Normed normed = run({.x = x, .added = y, .sum = sum}, gamma, beta, options);
  return {std::move(sum), std::move(normed)};
}

Tensor norm_backward(const Tensor& dy_any, const Tensor& x_any, const Tensor& gamma_any, const Normed& forward,
                     Tensor&& residual_any, const NormSums& sums) {
  if (!(dy_any.shape() == x_any.shape()) || dy_any.dtype() != x_any.dtype())
    throw Error("[norm_backward] dy is " + dy_any.describe() + "; x is " + x_any.describe());
  const Tensor dy = dy_any.contiguous(), x = x_any.contiguous(), gamma = gamma_any.contiguous();
  const Tensor residual = residual_any.defined() ? residual_any.contiguous() : Tensor();
  residual_any = Tensor();
  Tensor dx = residual.defined() && residual.unique() ? residual : x.make(x.shape());
  const NormBackwardOperands operands{dx, dy, x, gamma, forward, residual};
  const auto on_cpu = [&] {
    if (sums.gamma.to.defined() || sums.beta.to.defined()) norm_sums_on_cpu(sums, operands);
    norm_backward_on_cpu(operands);
  };
  on_device(x.device(), on_cpu, [&] { cuda::norm_backward(operands, sums); });
  return dx;
}

}  // namespace tessera
