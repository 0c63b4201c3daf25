// GPU norms: a row stays in its threads' registers between one read and one write, so statistics need no extra pass.
#include <algorithm>
#include <cstdint>
#include <span>
#include <vector>

#include "tensor/cuda/columns.cuh"
#include "tensor/math.h"
#include "tensor/ops/norm.h"

namespace tessera::cuda {
namespace {

template <class T>
struct Forward : NormForward<T> {
  Rows rows;
};

// x + y, rounded, is the input of the statistics.
template <class T, bool kVectorized>
__device__ void add_residual(const Forward<T>& f, const RowThread& at, RegisterRow<T, kVectorized>& x) {
  using A = Accumulate<T>;
  const int n = f.rows.length;
  const RegisterRow<T, kVectorized> added(f.added + at.row * n, at, n);
  T* const sum = f.sum + at.row * n;
  const auto with_added = [&](int j, const Packed<T, kVecElems<T>>& packed, const Packed<T, kVecElems<T>>& other) {
    Packed<T, kVecElems<T>> both;
    for (int k = 0; k < kVecElems<T>; ++k) both.v[k] = T(static_cast<A>(packed.v[k]) + static_cast<A>(other.v[k]));
    store_vector<kVectorized>(sum, j, n, both);
    return both;
  };
  change_vectors(at, n, with_added, x, added, sum);
}

template <class T, bool kVectorized>
__global__ __launch_bounds__(kRowThreads) void norm_kernel(Forward<T> f) {
  using A = Accumulate<T>;
  const RowThread at = row_thread(f.rows);
  if (at.row >= f.rows.count) return;
  const int n = f.rows.length;
  RegisterRow<T, kVectorized> x(f.x + at.row * n, at, n);
  if (f.added) add_residual(f, at, x);
  const A inverse = A(1) / static_cast<A>(n);
  A mean = 0, square = 0;
  const auto add = [&](A v) { mean += v; };
  if (f.mean) {
    each_element(at, n, add, x);
    mean = row_sum(at, mean) * inverse;
  }
  const auto add_square = [&](A v) {
    const A d = v - mean;
    square += d * d;
  };
  each_element(at, n, add_square, x);
  const A rstd = A(1) / math::sqrt(row_sum(at, square) * inverse + f.eps);
  const auto store_y = [&](int j, const auto& packed) {
    const auto gamma = load_vector<kVectorized>(f.gamma, j, n);
    Packed<T, kVecElems<T>> beta{}, y;
    if (f.beta) beta = load_vector<kVectorized>(f.beta, j, n);
    for (int k = 0; k < kVecElems<T>; ++k) {
      const A xhat = (static_cast<A>(packed.v[k]) - mean) * rstd, by = static_cast<A>(gamma.v[k]);
      y.v[k] = T(f.beta ? math::fma(xhat, by, static_cast<A>(beta.v[k])) : xhat * by);
    }
    store_vector<kVectorized>(f.y + at.row * n, j, n, y);
  };
  each_vector(at, n, store_y, x);
  if (at.thread != 0) return;
  if (f.mean) f.mean[at.row] = mean;
  f.rstd[at.row] = rstd;
}

template <class T>
struct Backward : NormBackward<T> {
  using A = Accumulate<T>;
  A *by_gamma, *by_beta,
      *by_sum;  // (runs, C): per run, sums of dy xhat, dy, dx; null if not requested
  Rows runs;    // of `run_rows` rows
  int64_t rows, run_rows;
};

// A thread's sums over a run's rows: in registers for register-held vectors, otherwise in global memory that no other
// thread writes.
template <class T, bool kVectorized>
struct RunSums {
  using A = Accumulate<T>;
  A registers[kRegs][kVecElems<T>] = {};
  A* to;
  int n;
  bool first = true;

  __device__ RunSums(A* sums, int64_t run, int length) : to(sums ? sums + run * length : nullptr), n(length) {}
  template <class F>
  __device__ void add(int k, int j, const F& next) {  // next(e, sum) adds element e of the vector
    if (!to) return;
    if (k < kRegs) {
#pragma unroll
      for (int e = 0; e < kVecElems<T>; ++e) registers[k][e] = next(e, registers[k][e]);
    } else {
      each_in_vector<kVectorized, T>(j, n, [&](int e) { to[j + e] = next(e, first ? A(0) : to[j + e]); });
    }
  }
  __device__ void store(const RowThread& at) const {
    if (!to) return;
#pragma unroll
    for (int k = 0; k < kRegs; ++k)
      if (const int j = at.offset<T>(k); j < n) store_sums<kVectorized, T>(to, j, n, registers[k]);
  }
};

// A thread holds three rows and three sums in registers: more threads would spill them.
constexpr int kBackwardThreads = 256;

// Each warp (or block, for longer rows) computes the gradients of a run of rows and their partial sums for gamma, beta
// and a bias before the norm, in one pass over memory.
template <class T, bool kVectorized>
__global__ __launch_bounds__(kBackwardThreads, 1) void norm_backward_kernel(const __grid_constant__ Backward<T> f) {
  using A = Accumulate<T>;
  const RowThread at = row_thread(f.runs);
  if (at.row >= f.runs.count) return;
  const int n = f.runs.length;
  const A inverse = A(1) / static_cast<A>(n);
  const RegisterRow<T, kVectorized> gamma(f.gamma, at, n);
  RunSums<T, kVectorized> by_gamma(f.by_gamma, at.row, n), by_beta(f.by_beta, at.row, n), by_sum(f.by_sum, at.row, n);
  const int64_t end = std::min((at.row + 1) * f.run_rows, f.rows);
#pragma unroll 1
  for (int64_t i = at.row * f.run_rows; i < end; ++i) {
    // Without a residual, dy is loaded instead and not added.
    const RegisterRow<T, kVectorized> dy(f.dy + i * n, at, n), x(f.x + i * n, at, n),
        residual((f.residual ? f.residual : f.dy) + i * n, at, n);
    if (i + 1 < end) {
      fetch_row<T>(f.dy + (i + 1) * n, at, n);
      fetch_row<T>(f.x + (i + 1) * n, at, n);
      if (f.residual) fetch_row<T>(f.residual + (i + 1) * n, at, n);
    }
    const A mean = f.mean ? f.mean[i] : A(0), rstd = f.rstd[i];
    A along = 0, level = 0;
    const auto add = [&](A g, A in, A by) {
      const A weighted = g * by;
      along += weighted * ((in - mean) * rstd);
      level += weighted;
    };
    each_element(at, n, add, dy, x, gamma);
    along = row_sum(at, along) * inverse;
    level = f.mean ? row_sum(at, level) * inverse : A(0);
    const auto change_vector = [&](int k, int j, const auto& g, const auto& in, const auto& by, const auto& other) {
      const auto xhat = [&](int e) { return (static_cast<A>(in.v[e]) - mean) * rstd; };
      Packed<T, kVecElems<T>> dx;
      for (int e = 0; e < kVecElems<T>; ++e) {
        const A weighted = static_cast<A>(g.v[e]) * static_cast<A>(by.v[e]);
        const A change = weighted - level - xhat(e) * along;
        dx.v[e] = T(f.residual ? math::fma(rstd, change, static_cast<A>(other.v[e])) : rstd * change);
      }
      store_vector<kVectorized>(f.dx + i * n, j, n, dx);
      by_gamma.add(k, j, [&](int e, A sum) { return math::fma(static_cast<A>(g.v[e]), xhat(e), sum); });
      by_beta.add(k, j, [&](int e, A sum) { return sum + static_cast<A>(g.v[e]); });
      by_sum.add(k, j, [&](int e, A sum) { return sum + static_cast<A>(dx.v[e]); });
    };
    each_numbered_vector(at, n, change_vector, dy, x, gamma, residual);
    by_gamma.first = by_beta.first = by_sum.first = false;
  }
  by_gamma.store(at);
  by_beta.store(at);
  by_sum.store(at);
}

}  // namespace

void norm(const NormOperands& operands) {
  const Tensor& x = operands.x;
  const int64_t c = x.dim(-1);
  if (x.numel() == 0) return;
  with_floating(x.dtype(), "norm", [&](auto t) {
    using T = decltype(t);
    const Forward<T> f{make_norm_forward<T>(operands), partition_rows<T>(x.numel() / c, c)};
    const bool vectorized = is_vectorizable<T>(c, f.x, f.added, f.gamma, f.beta, f.sum, f.y);
    launch(context(x), f.added ? "add_norm" : "norm", f.rows.grid(),
           vectorized ? norm_kernel<T, true> : norm_kernel<T, false>, f);
  });
}

void norm_backward(const NormBackwardOperands& operands, const NormSums& sums) {
  const Tensor& x = operands.x;
  const int64_t c = x.dim(-1), n = c == 0 ? 0 : x.numel() / c, run_rows = rows_per_run(n),
                runs = blocks_for(n, run_rows);
  with_floating(x.dtype(), "norm_backward", [&](auto t) {
    using T = decltype(t);
    using A = Accumulate<T>;
    std::vector<RowSum> to;
    for (const RowSum* wanted : {&sums.gamma, &sums.beta})
      if (wanted->to.defined()) to.push_back(*wanted);
    const Tensor partials = to.empty() ? Tensor() : make_partials<A>(x, n, c, std::ssize(to));
    if (sums.partials) *sums.partials = make_partials<A>(x, n, c);
    A* const first = partials.data_on<A>(Device::cuda);
    A* const of_beta = to.size() == 2 ? first + runs * c : sums.beta.to.defined() ? first : nullptr;
    const Backward<T> f{make_norm_backward<T>(operands),
                        sums.gamma.to.defined() ? first : nullptr,
                        of_beta,
                        sums.partials ? sums.partials->device_data<A>() : nullptr,
                        partition_rows<T>(runs, c, kRegs, kBackwardThreads),
                        n,
                        run_rows};
    const bool vectorized =
        is_vectorizable<T>(c, f.dy, f.x, f.gamma, f.residual, f.dx, f.by_gamma, f.by_beta, f.by_sum);
    launch(context(x), "norm_backward", f.runs.grid(),
           vectorized ? norm_backward_kernel<T, true> : norm_backward_kernel<T, false>, f);
    if (!to.empty()) add_partials<A>("norm_backward", std::span(to), partials);
  });
}

}  // namespace tessera::cuda
