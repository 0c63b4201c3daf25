// Cross-entropy on a GPU: the vocabulary of a row is walked once by a block, each thread with an online maximum of its
// own; backward walks it once more and writes each 16 bytes of the gradient where their logits were.
//
// The exponentials of these kernels, the most of any in a training step, are CUDA's own, which are good to 1 unit in
// the last place as math::exp() is and cost a third of it.
#include <limits>

#include "tensor/cuda/cross_entropy.h"
#include "tensor/cuda/indices.cuh"
#include "tensor/cuda/reduce.h"
#include "tensor/cuda/rows.cuh"
#include "tensor/math.h"

namespace tessera::cuda {
namespace {

__device__ inline float exponential(float x) { return expf(x); }
__device__ inline double exponential(double x) { return exp(x); }

constexpr int kPartsEach = 8;  // parts of a row for a thread, about

template <class T>
struct Logits {
  const T* x;
  const int32_t* targets;
  Rows rows;
  Bounds bounds;  // of all targets
  int64_t first;  // of the columns here
};

template <class T>
Logits<T> logits_of(const Tensor& x, const Tensor& targets, const VocabPart& part) {
  const int64_t vocab = part.whole > 0 ? part.whole : x.dim(1);
  return {x.device_data<T>(), targets.device_data<int32_t>(), rows_of<T>(x.dim(0), x.dim(1), kPartsEach),
          context(x).bounds({.op = "cross_entropy", .what = "target", .where = "of row", .limit = vocab}), part.first};
}

// The column of row i's target, or -1 where it is ignored or not here.
template <class T>
__device__ int column_of(const Logits<T>& f, int64_t i, int32_t target) {
  if (target == kIgnoredTarget || !inside(f.bounds, i, target)) return -1;
  const int64_t at = target - f.first;
  return at >= 0 && at < f.rows.length ? static_cast<int>(at) : -1;
}

// What a row adds to the loss, and to the number of target tokens.
template <class A>
__device__ void store_loss(double* losses, const Rows& rows, int64_t i, A lse, const A* logit) {
  losses[i] = logit ? static_cast<double>(lse) - static_cast<double>(*logit) : 0;
  losses[rows.count + i] = logit ? 1 : 0;
}

template <class T, bool kWhole>
__global__ __launch_bounds__(kRowThreads) void cross_entropy_kernel(Logits<T> f, Accumulate<T>* lse, double* losses) {
  using A = Accumulate<T>;
  const RowThread at = row_thread(f.rows);
  if (at.row >= f.rows.count) return;
  const int n = f.rows.length;
  const T* const row = f.x + at.row * n;
  A max = -std::numeric_limits<A>::max(), sum = 0;  // finite: no difference of two infinities below
  stream_parts<kWhole>(at, row, n, [&](int j, const auto& part) {
    A top = max;
    each_in_part<kWhole, T>(j, n, [&](int k) { top = std::max(top, static_cast<A>(part.v[k])); });
    if (top > max) {
      sum *= exponential(max - top);
      max = top;
    }
    each_in_part<kWhole, T>(j, n, [&](int k) { sum += exponential(static_cast<A>(part.v[k]) - max); });
  });
  const A top = row_top(at, max);
  const A own = top + math::log(row_sum(at, sum * exponential(max - top)));
  if (at.thread != 0) return;
  lse[at.row] = own;
  const int column = column_of(f, at.row, f.targets[at.row]);
  const A logit = column < 0 ? A(0) : static_cast<A>(row[column]);
  store_loss(losses, f.rows, at.row, own, column < 0 ? nullptr : &logit);
}

template <class T>
struct Gradient {
  Logits<T> of;
  const Accumulate<T>* lse;
  T* dx;                // may be the logits
  double scale;         // times
  const double* times;  // this, unless it is null
};

template <class T, bool kWhole>
__global__ __launch_bounds__(kRowThreads) void cross_entropy_backward_kernel(Gradient<T> f) {
  using A = Accumulate<T>;
  const RowThread at = row_thread(f.of.rows);
  if (at.row >= f.of.rows.count) return;
  const int n = f.of.rows.length;
  const int32_t target = f.of.targets[at.row];
  const int column = column_of(f.of, at.row, target);
  const auto scale = static_cast<A>(f.times ? f.scale * *f.times : f.scale);
  const A shift = f.lse[at.row], by = target == kIgnoredTarget ? A(0) : scale;
  T* const to = f.dx + at.row * n;
  stream_parts<kWhole>(at, f.of.x + at.row * n, n, [&](int j, const auto& part) {
    Packed<T, kPart<T>> dx;
    for (int k = 0; k < kPart<T>; ++k) dx.v[k] = T(exponential(static_cast<A>(part.v[k]) - shift) * by);
    if (column >= j && column < j + kPart<T>) {
#pragma unroll
      for (int k = 0; k < kPart<T>; ++k)
        if (j + k == column) dx.v[k] = T((exponential(static_cast<A>(part.v[k]) - shift) - A(1)) * by);
    }
    store_part<kWhole>(to, j, n, dx);
  });
}

// out = the row's maximum where max is null, else the sum of exp(logit - max).
template <class T, bool kWhole>
__global__ __launch_bounds__(kRowThreads) void row_kernel(const T* x, Rows rows, const Accumulate<T>* max,
                                                          Accumulate<T>* out) {
  using A = Accumulate<T>;
  const RowThread at = row_thread(rows);
  if (at.row >= rows.count) return;
  const int n = rows.length;
  const T* const row = x + at.row * n;
  A own = max ? A(0) : -std::numeric_limits<A>::infinity();
  const A top = max ? max[at.row] : A(0);
  stream_parts<kWhole>(at, row, n, [&](int j, const auto& part) {
    each_in_part<kWhole, T>(j, n, [&](int k) {
      const A v = static_cast<A>(part.v[k]);
      own = max ? own + exponential(v - top) : std::max(own, v);
    });
  });
  own = max ? row_sum(at, own) : row_top(at, own);
  if (at.thread == 0) out[at.row] = own;
}

template <class T>
__global__ void target_logits_kernel(Logits<T> f, Accumulate<T>* out) {
  const int64_t i = global_thread();
  if (i >= f.rows.count) return;
  const int column = column_of(f, i, f.targets[i]);
  out[i] = column < 0 ? Accumulate<T>(0) : static_cast<Accumulate<T>>(f.x[i * f.rows.length + column]);
}

template <class A>
struct Joined {
  const A *max, *sum_exp, *logit;
  const int32_t* targets;
  A* lse;
  double* losses;
  Rows rows;
};

template <class A>
__global__ void joined_kernel(Joined<A> f) {
  const int64_t i = global_thread();
  if (i >= f.rows.count) return;
  const A own = f.max[i] + math::log(f.sum_exp[i]);
  f.lse[i] = own;
  store_loss(f.losses, f.rows, i, own, f.targets[i] == kIgnoredTarget ? nullptr : f.logit + i);
}

RowLosses room_for(const Tensor& like, int64_t n, DType wide) {
  return {like.make({n}, wide), like.make({2, n}, DType::float64), like.make({2}, DType::float64)};
}

void row_max_or_sum(const char* op, const Tensor& out, const Tensor& x, const Tensor* max) {
  if (x.dim(0) == 0) return;
  with_floating(x.dtype(), op, [&](auto t) {
    using T = decltype(t);
    using A = Accumulate<T>;
    const Rows rows = rows_of<T>(x.dim(0), x.dim(1), kPartsEach);
    const T* const from = x.device_data<T>();
    const auto queue = [&](auto whole) {
      launch(context(x), op, rows.grid(), row_kernel<T, decltype(whole)::value>, from, rows,
             max ? max->device_data<A>() : nullptr, out.device_data<A>());
    };
    with_parts<T>(x.dim(1), queue, from);
  });
}

}  // namespace

RowLosses cross_entropy(const Tensor& logits, const Tensor& targets) {
  return with_floating(logits.dtype(), "cross_entropy", [&](auto t) {
    using T = decltype(t);
    using A = Accumulate<T>;
    RowLosses out = room_for(logits, logits.dim(0), kDTypeOf<A>);
    const Logits<T> f = logits_of<T>(logits, targets, {});
    const auto queue = [&](auto whole) {
      launch(context(logits), "cross_entropy", f.rows.grid(), cross_entropy_kernel<T, decltype(whole)::value>, f,
             out.lse.template device_data<A>(), out.losses.template device_data<double>());
    };
    with_parts<T>(logits.dim(1), queue, f.x);
    sums("cross_entropy", out.totals, out.losses);
    return out;
  });
}

RowLosses joined_cross_entropy(const Tensor& max, const Tensor& sum_exp, const Tensor& own, const Tensor& targets) {
  RowLosses out = room_for(max, max.numel(), max.dtype());
  with_floating(max.dtype(), "cross_entropy", [&](auto t) {
    using A = Accumulate<decltype(t)>;
    const Joined<A> f{.max = max.device_data<A>(),
                      .sum_exp = sum_exp.device_data<A>(),
                      .logit = own.device_data<A>(),
                      .targets = targets.device_data<int32_t>(),
                      .lse = out.lse.template device_data<A>(),
                      .losses = out.losses.template device_data<double>(),
                      .rows = {.count = max.numel()}};
    launch(context(max), "cross_entropy", {.blocks = blocks_for(f.rows.count, kThreads)}, joined_kernel<A>, f);
  });
  sums("cross_entropy", out.totals, out.losses);
  return out;
}

void cross_entropy_backward(const Tensor& dlogits, const Scored& of, const GradientScale& scale,
                            const VocabPart& part) {
  with_floating(of.logits.dtype(), "cross_entropy_backward", [&](auto t) {
    using T = decltype(t);
    using A = Accumulate<T>;
    const Gradient<T> f{logits_of<T>(of.logits, of.targets, part), of.lse.device_data<A>(), dlogits.device_data<T>(),
                        scale.number, scale.times.defined() ? scale.times.device_data<double>() : nullptr};
    const auto queue = [&](auto whole) {
      launch(context(dlogits), "cross_entropy_backward", f.of.rows.grid(),
             cross_entropy_backward_kernel<T, decltype(whole)::value>, f);
    };
    with_parts<T>(dlogits.dim(1), queue, f.of.x, f.dx);
  });
}

void row_max(const Tensor& out, const Tensor& logits) { row_max_or_sum("row_max", out, logits, nullptr); }
void row_sum_exp(const Tensor& out, const Tensor& logits, const Tensor& max) {
  row_max_or_sum("row_sum_exp", out, logits, &max);
}

void target_logits(const Tensor& out, const Tensor& logits, const Tensor& targets, const VocabPart& part) {
  with_floating(logits.dtype(), "target_logits", [&](auto t) {
    using T = decltype(t);
    const Logits<T> f = logits_of<T>(logits, targets, part);
    launch(context(logits), "target_logits", {.blocks = blocks_for(f.rows.count, kThreads)}, target_logits_kernel<T>, f,
           out.device_data<Accumulate<T>>());
  });
}

}  // namespace tessera::cuda
