// Norms on a GPU: a row stays in the registers of its threads from the one read to the one write, so statistics cost no
// pass over memory of their own.
#include "tensor/cuda/columns.cuh"
#include "tensor/math.h"
#include "tensor/ops/norm.h"

namespace tessera::cuda {
namespace {

template <class T>
struct Forward {
  using A = Accumulate<T>;
  const T *x, *added, *gamma, *beta;  // added and beta may be null
  T *sum, *y;                         // sum may be null
  A *mean, *rstd;                     // mean is null for RMSNorm
  A eps;
  Rows rows;
};

// x + y as stored, of which the statistics are taken.
template <class T, bool kWhole>
__device__ void add_residual(const Forward<T>& f, const RowThread& at, HeldRow<T, kWhole>& x) {
  using A = Accumulate<T>;
  const int n = f.rows.length;
  const HeldRow<T, kWhole> added(f.added + at.row * n, at, n);
  T* const sum = f.sum + at.row * n;
  const auto with_added = [&](int j, const Packed<T, kPart<T>>& part, const Packed<T, kPart<T>>& other) {
    Packed<T, kPart<T>> both;
    for (int k = 0; k < kPart<T>; ++k) both.v[k] = T(static_cast<A>(part.v[k]) + static_cast<A>(other.v[k]));
    store_part<kWhole>(sum, j, n, both);
    return both;
  };
  change_parts(at, n, with_added, x, added, sum);
}

template <class T, bool kWhole>
__global__ __launch_bounds__(kRowThreads) void norm_kernel(Forward<T> f) {
  using A = Accumulate<T>;
  const RowThread at = row_thread(f.rows);
  if (at.row >= f.rows.count) return;
  const int n = f.rows.length;
  HeldRow<T, kWhole> x(f.x + at.row * n, at, n);
  if (f.added) add_residual(f, at, x);
  const A inverse = A(1) / static_cast<A>(n);
  A mean = 0, square = 0;
  if (f.mean) {
    each_part(
        at, n,
        [&](int j, const auto& part) {
          each_in_part<kWhole, T>(j, n, [&](int k) { mean += static_cast<A>(part.v[k]); });
        },
        x);
    mean = row_sum(at, mean) * inverse;
  }
  each_part(
      at, n,
      [&](int j, const auto& part) {
        each_in_part<kWhole, T>(j, n, [&](int k) {
          const A d = static_cast<A>(part.v[k]) - mean;
          square += d * d;
        });
      },
      x);
  const A rstd = A(1) / math::sqrt(row_sum(at, square) * inverse + f.eps);
  each_part(
      at, n,
      [&](int j, const auto& part) {
        const auto gamma = load_part<kWhole>(f.gamma, j, n);
        Packed<T, kPart<T>> beta{}, y;
        if (f.beta) beta = load_part<kWhole>(f.beta, j, n);
        for (int k = 0; k < kPart<T>; ++k) {
          const A xhat = (static_cast<A>(part.v[k]) - mean) * rstd, by = static_cast<A>(gamma.v[k]);
          y.v[k] = T(f.beta ? math::fma(xhat, by, static_cast<A>(beta.v[k])) : xhat * by);
        }
        store_part<kWhole>(f.y + at.row * n, j, n, y);
      },
      x);
  if (at.thread != 0) return;
  if (f.mean) f.mean[at.row] = mean;
  f.rstd[at.row] = rstd;
}

template <class T>
struct Backward {
  using A = Accumulate<T>;
  const T *dy, *x, *gamma, *residual;  // residual may be null, or dx itself
  const A *mean, *rstd;
  T* dx;
  Rows rows;
};

// One block for each multiprocessor is enough: to make room for two, the compiler would spill registers.
template <class T, bool kWhole>
__global__ __launch_bounds__(kRowThreads, 1) void norm_backward_kernel(Backward<T> f) {
  using A = Accumulate<T>;
  const RowThread at = row_thread(f.rows);
  if (at.row >= f.rows.count) return;
  const int n = f.rows.length;
  // Without a residual its row is dy's again, which is not added.
  const HeldRow<T, kWhole> dy(f.dy + at.row * n, at, n), x(f.x + at.row * n, at, n),
      residual((f.residual ? f.residual : f.dy) + at.row * n, at, n);
  const A mean = f.mean ? f.mean[at.row] : A(0), rstd = f.rstd[at.row], inverse = A(1) / static_cast<A>(n);
  A along = 0, level = 0;
  each_part(
      at, n,
      [&](int j, const auto& g, const auto& in) {
        const auto gamma = load_part<kWhole>(f.gamma, j, n);
        each_in_part<kWhole, T>(j, n, [&](int k) {
          const A weighted = static_cast<A>(g.v[k]) * static_cast<A>(gamma.v[k]);
          along += weighted * ((static_cast<A>(in.v[k]) - mean) * rstd);
          level += weighted;
        });
      },
      dy, x);
  along = row_sum(at, along) * inverse;
  level = f.mean ? row_sum(at, level) * inverse : A(0);
  each_part(
      at, n,
      [&](int j, const auto& g, const auto& in, const auto& other) {
        const auto gamma = load_part<kWhole>(f.gamma, j, n);
        Packed<T, kPart<T>> dx;
        for (int k = 0; k < kPart<T>; ++k) {
          const A weighted = static_cast<A>(g.v[k]) * static_cast<A>(gamma.v[k]);
          const A change = weighted - level - (static_cast<A>(in.v[k]) - mean) * rstd * along;
          dx.v[k] = T(f.residual ? math::fma(rstd, change, static_cast<A>(other.v[k])) : rstd * change);
        }
        store_part<kWhole>(f.dx + at.row * n, j, n, dx);
      },
      dy, x, residual);
}

template <class T>
struct WeightGrads {
  using A = Accumulate<T>;
  const T *dy, *x;
  const A *mean, *rstd;   // mean is null for RMSNorm
  A *by_gamma, *by_beta;  // by_beta is null where nobody wants it
  Columns at;
};

template <class T, bool kWhole>
__global__ void norm_weight_grads_kernel(WeightGrads<T> f) {
  using A = Accumulate<T>;
  const ColumnThread at = column_thread<T>(f.at);
  if (at.first >= f.at.rows) return;
  const int c = f.at.length;
  Packed<A, kPart<T>> total{}, plain{};
#pragma unroll 4
  for (int64_t i = at.first; i < at.last; ++i) {
    const auto g = load_part<kWhole>(f.dy + i * c, at.j, c), x = load_part<kWhole>(f.x + i * c, at.j, c);
    const A mean = f.mean ? f.mean[i] : A(0), rstd = f.rstd[i];
    for (int k = 0; k < kPart<T>; ++k) {
      const A d = static_cast<A>(g.v[k]);
      total.v[k] = math::fma(d, (static_cast<A>(x.v[k]) - mean) * rstd, total.v[k]);
      plain.v[k] += d;
    }
  }
  store_parts<kWhole, T>(f.by_gamma, at, f.at, total.v);
  if (f.by_beta) store_parts<kWhole, T>(f.by_beta, at, f.at, plain.v);
}

template <class T>
T* data_or_null(const Tensor* t) {
  return t && t->defined() ? t->device_data<T>() : nullptr;
}

}  // namespace

void norm(const NormOperands& operands, const Normed& to, double eps) {
  const Tensor& x = *operands.x;
  const int64_t c = x.dim(-1);
  if (x.numel() == 0) return;
  with_floating(x.dtype(), "norm", [&](auto t) {
    using T = decltype(t);
    using A = Accumulate<T>;
    const Forward<T> f{.x = x.device_data<T>(),
                       .added = data_or_null<T>(operands.added),
                       .gamma = operands.gamma->device_data<T>(),
                       .beta = data_or_null<T>(operands.beta),
                       .sum = data_or_null<T>(operands.sum),
                       .y = to.y.device_data<T>(),
                       .mean = data_or_null<A>(&to.mean),
                       .rstd = to.rstd.device_data<A>(),
                       .eps = static_cast<A>(eps),
                       .rows = rows_of<T>(x.numel() / c, c)};
    const auto queue = [&](auto whole) {
      launch(context(x), f.added ? "add_norm" : "norm", f.rows.grid(), norm_kernel<T, decltype(whole)::value>, f);
    };
    with_parts<T>(c, queue, f.x, f.added, f.gamma, f.beta, f.sum, f.y);
  });
}

void norm_backward(const Tensor& dx, const NormOperands& operands, const Tensor& dy, const Normed& forward,
                   const Tensor* residual) {
  const Tensor& x = *operands.x;
  const int64_t c = x.dim(-1);
  if (x.numel() == 0) return;
  with_floating(x.dtype(), "norm_backward", [&](auto t) {
    using T = decltype(t);
    using A = Accumulate<T>;
    const Backward<T> f{.dy = dy.device_data<T>(),
                        .x = x.device_data<T>(),
                        .gamma = operands.gamma->device_data<T>(),
                        .residual = data_or_null<T>(residual),
                        .mean = data_or_null<A>(&forward.mean),
                        .rstd = forward.rstd.device_data<A>(),
                        .dx = dx.device_data<T>(),
                        .rows = rows_of<T>(x.numel() / c, c)};
    const auto queue = [&](auto whole) {
      launch(context(x), "norm_backward", f.rows.grid(), norm_backward_kernel<T, decltype(whole)::value>, f);
    };
    with_parts<T>(c, queue, f.dy, f.x, f.gamma, f.residual, f.dx);
  });
}

void norm_weight_grads(const Tensor& dgamma, const Tensor* dbeta, const Tensor& dy, const Tensor& x,
                       const Normed& forward) {
  const int64_t c = x.dim(-1), n = c == 0 ? 0 : x.numel() / c;
  with_floating(x.dtype(), "norm_weight_grads", [&](auto t) {
    using T = decltype(t);
    using A = Accumulate<T>;
    const Tensor by_gamma = parts_for<A>(x, n, c), by_beta = dbeta ? parts_for<A>(x, n, c) : Tensor();
    const WeightGrads<T> f{.dy = dy.device_data<T>(),
                           .x = x.device_data<T>(),
                           .mean = data_or_null<A>(&forward.mean),
                           .rstd = forward.rstd.device_data<A>(),
                           .by_gamma = by_gamma.device_data<A>(),
                           .by_beta = data_or_null<A>(&by_beta),
                           .at = {n, static_cast<int>(c), kRowsTogether}};
    const auto queue = [&](auto whole) {
      launch(context(x), "norm_weight_grads", f.at.template grid<T>(),
             norm_weight_grads_kernel<T, decltype(whole)::value>, f);
    };
    with_parts<T>(c, queue, f.dy, f.x);
    add_parts<A>("norm_weight_grads", dgamma, by_gamma);
    if (dbeta) add_parts<A>("norm_weight_grads", *dbeta, by_beta);
  });
}

}  // namespace tessera::cuda
