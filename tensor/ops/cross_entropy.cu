// GPU cross-entropy, which evaluates more exponentials than any other op of a training step. CUDA's expf() is accurate
// to 1 ulp like math::exp() at a third of its cost; bfloat16 logits use a fast approximation, because otherwise
// arithmetic rather than bandwidth would bound the kernels.
#include <algorithm>
#include <cstdint>
#include <limits>
#include <type_traits>

#include "tensor/cuda/launch.cuh"
#include "tensor/cuda/mma.cuh"
#include "tensor/cuda/rows.cuh"
#include "tensor/math.h"
#include "tensor/ops/cross_entropy.h"
#include "tensor/ops/reduce.h"

namespace tessera::cuda {

__device__ inline float exponential(float x) { return expf(x); }
__device__ inline double exponential(double x) { return exp(x); }

template <class T>
__device__ Accumulate<T> exponential_from(T x, Accumulate<T> y) {
  constexpr float kLog2OfE = 1.44269504f;
  if constexpr (std::is_same_v<T, bfloat16>)
    return fast_exp2((static_cast<float>(x) - y) * kLog2OfE);  // subtracting first avoids a NaN for -inf
  else
    return exponential(x - y);
}

inline constexpr int kVectorsPerThread = 8;  // vectors of a row per thread, approximately

template <class T>
struct Logits {
  const T* x;
  const int32_t* targets;
  Rows rows;
  Bounds bounds;  // of all targets
  int64_t first;  // first local column
};

template <class T>
Logits<T> compute_logits(const Tensor& x, const Tensor& targets, const VocabShard& shard) {
  const int64_t vocab = shard.total > 0 ? shard.total : x.dim(1);
  return {x.device_data<T>(), targets.device_data<int32_t>(), partition_rows<T>(x.dim(0), x.dim(1), kVectorsPerThread),
          context(x).bounds({.op = "cross_entropy", .what = "target", .where = "of row", .limit = vocab}), shard.first};
}

// Local column of row i's target; -1 if ignored or in another shard.
template <class T>
__device__ int target_column(const Logits<T>& f, int64_t i, int32_t target) {
  if (target == kIgnoredTarget || !inside(f.bounds, i, target)) return -1;
  const int64_t at = target - f.first;
  return at >= 0 && at < f.rows.length ? static_cast<int>(at) : -1;
}

template <class A>
__device__ void store_loss(double* losses, const Rows& rows, int64_t i, A lse, A logit, bool counts) {
  losses[i] = counts ? static_cast<double>(lse) - static_cast<double>(logit) : 0;
  losses[rows.count + i] = counts ? 1 : 0;
}

inline RowLosses allocate_losses(const Tensor& like, int64_t n, DType wide) {
  return {like.make({n}, wide), like.make({2, n}, DType::float64), like.make({2}, DType::float64)};
}

// A block reads a row once, with an online maximum per thread; backward reads it again and overwrites the logits with
// their gradient, 16 bytes at a time. If the gradient is needed immediately, one kernel does both with the row in
// shared memory.

namespace {

// kMaxShared: maximum bytes of a row such that two rows fit on a multiprocessor. kOwnShared: the kernel's other shared
// memory, including alignment.
constexpr int64_t kMaxShared = 112 * 1024, kOwnShared = 1024;

template <class T>
struct Online {
  using A = Accumulate<T>;
  A max = -std::numeric_limits<A>::max(), sum = 0;  // finite, to avoid inf - inf below

  template <bool kVectorized>
  __device__ void add(const Packed<T, kVecElems<T>>& packed, int j, int n) {
    A top = max;
    each_in_vector<kVectorized, T>(j, n, [&](int k) { top = std::max(top, static_cast<A>(packed.v[k])); });
    if (top > max) {
      sum *= exponential(max - top);
      max = top;
    }
    each_in_vector<kVectorized, T>(j, n, [&](int k) { sum += exponential_from(packed.v[k], max); });
  }
  __device__ A row_lse(const RowThread& at) const {
    const A top = row_top(at, max);
    return top + math::log(row_sum(at, sum * exponential(max - top)));
  }
};

template <class T>
struct Scores {
  Accumulate<T>* lse;
  double* losses;
  __device__ void store(const Logits<T>& f, const RowThread& at, Accumulate<T> own, const T* row) const {
    using A = Accumulate<T>;
    lse[at.row] = own;
    const int column = target_column(f, at.row, f.targets[at.row]);
    const A logit = column < 0 ? A(0) : static_cast<A>(row[column]);
    store_loss(losses, f.rows, at.row, own, logit, column >= 0);
  }
};

template <class T, bool kVectorized>
__global__ __launch_bounds__(kRowThreads) void cross_entropy_kernel(Logits<T> f, Scores<T> to) {
  const RowThread at = row_thread(f.rows);
  if (at.row >= f.rows.count) return;
  const int n = f.rows.length;
  const T* const row = f.x + at.row * n;
  Online<T> online;
  stream_vectors<kVectorized>(at, row, n, [&](int j, const auto& v) { online.template add<kVectorized>(v, j, n); });
  const auto own = online.row_lse(at);
  if (at.thread == 0) to.store(f, at, own, row);
}

template <class T>
struct Gradient {
  Logits<T> of;
  const Accumulate<T>* lse;
  T* dx;
  double scale;         // multiplied by *times
  const double* times;  // null: 1
};

template <class T>
struct RowGradient {
  using A = Accumulate<T>;
  int column;
  A shift, by;
  __device__ RowGradient(const Logits<T>& f, int64_t i, A lse, double scale) : shift(lse) {
    const int32_t target = f.targets[i];
    column = target_column(f, i, target);
    by = target == kIgnoredTarget ? A(0) : static_cast<A>(scale);
  }
  __device__ Packed<T, kVecElems<T>> of(const Packed<T, kVecElems<T>>& packed, int j) const {
    Packed<T, kVecElems<T>> dx;
    for (int k = 0; k < kVecElems<T>; ++k) dx.v[k] = T(exponential_from(packed.v[k], shift) * by);
    if (column >= j && column < j + kVecElems<T>) {
#pragma unroll
      for (int k = 0; k < kVecElems<T>; ++k)
        if (j + k == column) dx.v[k] = T((exponential_from(packed.v[k], shift) - A(1)) * by);
    }
    return dx;
  }
};

template <class T, bool kVectorized>
__global__ __launch_bounds__(kRowThreads) void cross_entropy_backward_kernel(Gradient<T> f) {
  const RowThread at = row_thread(f.of.rows);
  if (at.row >= f.of.rows.count) return;
  const int n = f.of.rows.length;
  const RowGradient<T> gradient(f.of, at.row, f.lse[at.row], f.times ? f.scale * *f.times : f.scale);
  T* const to = f.dx + at.row * n;
  stream_vectors<kVectorized>(at, f.of.x + at.row * n, n,
                              [&](int j, const auto& v) { store_vector<kVectorized>(to, j, n, gradient.of(v, j)); });
}

// Fused forward and backward for a row that fits into shared memory: read once, with all loads in flight. Each thread
// processes the vectors that it copied, in the order of the kernels above, so results are bitwise identical to theirs;
// the row reduction's barriers precede the read of the target's logit, which another thread may have copied.
template <class T>
__global__ __launch_bounds__(kRowThreads) void cross_entropy_in_place_kernel(Gradient<T> f, Scores<T> to) {
  const RowThread at{blockIdx.x, static_cast<int>(threadIdx.x), f.of.rows.width};
  const int n = f.of.rows.length, step = at.width * kVecElems<T>;
  T *const row = dynamic_shared<T>(), *const there = f.dx + at.row * n;
  for (int j = at.offset<T>(0); j < n; j += step) copy_async(shared_address(row + j), there + j, true);
  commit_copies();
  wait_for_copies<0>();
  Online<T> online;
  for (int j = at.offset<T>(0); j < n; j += step) online.template add<true>(load<kVecElems<T>>(row + j), j, n);
  const auto own = online.row_lse(at);
  if (at.thread == 0) to.store(f.of, at, own, row);
  const RowGradient<T> gradient(f.of, at.row, own, f.scale);
  for (int j = at.offset<T>(0); j < n; j += step) store(there + j, gradient.of(load<kVecElems<T>>(row + j), j));
}

template <class T, bool kVectorized>
__global__ void times_kernel(T* x, Rows rows, const double* times) {
  const double by = *times;
  if (by == 1) return;
  for (int64_t i = blockIdx.x; i < rows.count; i += gridDim.x)
    for (int j = static_cast<int>(threadIdx.x) * kVecElems<T>; j < rows.length; j += kThreads * kVecElems<T>) {
      T* const row = x + i * rows.length;
      Packed<T, kVecElems<T>> packed = load_vector<kVectorized>(row, j, rows.length);
      for (int k = 0; k < kVecElems<T>; ++k)
        packed.v[k] = T(static_cast<Accumulate<T>>(packed.v[k]) * static_cast<Accumulate<T>>(by));
      store_vector<kVectorized>(row, j, rows.length, packed);
    }
}

template <class T>
Scores<T> make_scores(const RowLosses& out) {
  return {out.lse.device_data<Accumulate<T>>(), out.losses.device_data<double>()};
}

}  // namespace

RowLosses cross_entropy(const Tensor& logits, const Tensor& targets) {
  return with_floating(logits.dtype(), "cross_entropy", [&](auto t) {
    using T = decltype(t);
    RowLosses out = allocate_losses(logits, logits.dim(0), kDTypeOf<Accumulate<T>>);
    const Logits<T> f = compute_logits<T>(logits, targets, {});
    const bool vectorized = is_vectorizable<T>(logits.dim(1), f.x);
    launch(context(logits), "cross_entropy", f.rows.grid(),
           vectorized ? cross_entropy_kernel<T, true> : cross_entropy_kernel<T, false>, f, make_scores<T>(out));
    sums("cross_entropy", out.totals, out.losses);
    return out;
  });
}

RowLosses cross_entropy_in_place(const Tensor& logits, const Tensor& targets, double scale) {
  return with_floating(logits.dtype(), "cross_entropy", [&](auto t) {
    using T = decltype(t);
    const Logits<T> f = compute_logits<T>(logits, targets, {});
    const int64_t row = logits.dim(1) * static_cast<int64_t>(sizeof(T));
    if (!is_vectorizable<T>(logits.dim(1), f.x) || f.rows.width == 32 ||
        row + kOwnShared > context(logits).max_shared() || row > kMaxShared) {
      RowLosses out = cuda::cross_entropy(logits, targets);
      cuda::cross_entropy_backward(logits, Scored{logits, targets, out.lse}, scale, {});
      return out;
    }
    RowLosses out = allocate_losses(logits, logits.dim(0), kDTypeOf<Accumulate<T>>);
    const Gradient<T> both{f, nullptr, logits.device_data<T>(), scale, nullptr};
    launch(context(logits), "cross_entropy",
           {.blocks = f.rows.count, .threads = f.rows.width, .shared = static_cast<int>(row)},
           cross_entropy_in_place_kernel<T>, both, make_scores<T>(out));
    sums("cross_entropy", out.totals, out.losses);
    return out;
  });
}

void multiply_by(const Tensor& x, const Tensor& times) {
  constexpr int64_t kBlocks = 1024;
  with_floating(x.dtype(), "cross_entropy_backward", [&](auto t) {
    using T = decltype(t);
    const Rows rows{x.dim(0), static_cast<int>(x.dim(1))};
    T* const to = x.device_data<T>();
    const bool vectorized = is_vectorizable<T>(x.dim(1), to);
    launch(context(x), "cross_entropy_backward", {.blocks = std::min(rows.count, kBlocks)},
           vectorized ? times_kernel<T, true> : times_kernel<T, false>, to, rows, times.device_data<double>());
  });
}

void cross_entropy_backward(const Tensor& dlogits, const Scored& of, const GradientScale& scale,
                            const VocabShard& shard) {
  with_floating(of.logits.dtype(), "cross_entropy_backward", [&](auto t) {
    using T = decltype(t);
    using A = Accumulate<T>;
    const Gradient<T> f{compute_logits<T>(of.logits, of.targets, shard), of.lse.device_data<A>(),
                        dlogits.device_data<T>(), scale.number,
                        scale.times.defined() ? scale.times.device_data<double>() : nullptr};
    const bool vectorized = is_vectorizable<T>(dlogits.dim(1), f.of.x, f.dx);
    launch(context(dlogits), "cross_entropy_backward", f.of.rows.grid(),
           vectorized ? cross_entropy_backward_kernel<T, true> : cross_entropy_backward_kernel<T, false>, f);
  });
}

namespace {

// The row's maximum if max is null, otherwise the sum of exp(logit - max).
template <class T, bool kVectorized>
__global__ __launch_bounds__(kRowThreads) void row_kernel(const T* x, Rows rows, const Accumulate<T>* max,
                                                          Accumulate<T>* out) {
  using A = Accumulate<T>;
  const RowThread at = row_thread(rows);
  if (at.row >= rows.count) return;
  const int n = rows.length;
  const T* const row = x + at.row * n;
  A own = max ? A(0) : -std::numeric_limits<A>::infinity();
  const A top = max ? max[at.row] : A(0);
  stream_vectors<kVectorized>(at, row, n, [&](int j, const auto& packed) {
    each_in_vector<kVectorized, T>(j, n, [&](int k) {
      own = max ? own + exponential_from(packed.v[k], top) : std::max(own, static_cast<A>(packed.v[k]));
    });
  });
  own = max ? row_sum(at, own) : row_top(at, own);
  if (at.thread == 0) out[at.row] = own;
}

template <class T>
__global__ void target_logits_kernel(Logits<T> f, Accumulate<T>* out) {
  const int64_t i = global_thread();
  if (i >= f.rows.count) return;
  const int column = target_column(f, i, f.targets[i]);
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
  store_loss(f.losses, f.rows, i, own, f.logit[i], f.targets[i] != kIgnoredTarget);
}

void row_max_or_sum(const char* op, const Tensor& out, const Tensor& x, const Tensor* max) {
  if (x.dim(0) == 0) return;
  with_floating(x.dtype(), op, [&](auto t) {
    using T = decltype(t);
    using A = Accumulate<T>;
    const Rows rows = partition_rows<T>(x.dim(0), x.dim(1), kVectorsPerThread);
    const T* const from = x.device_data<T>();
    const bool vectorized = is_vectorizable<T>(x.dim(1), from);
    launch(context(x), op, rows.grid(), vectorized ? row_kernel<T, true> : row_kernel<T, false>, from, rows,
           max ? max->device_data<A>() : nullptr, out.device_data<A>());
  });
}

}  // namespace

RowLosses joined_cross_entropy(const Tensor& max, const Tensor& sum_exp, const Tensor& own, const Tensor& targets) {
  RowLosses out = allocate_losses(max, max.numel(), max.dtype());
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

void row_max(const Tensor& out, const Tensor& logits) { row_max_or_sum("row_max", out, logits, nullptr); }
void row_sum_exp(const Tensor& out, const Tensor& logits, const Tensor& max) {
  row_max_or_sum("row_sum_exp", out, logits, &max);
}

void target_logits(const Tensor& out, const Tensor& logits, const Tensor& targets, const VocabShard& shard) {
  with_floating(logits.dtype(), "target_logits", [&](auto t) {
    using T = decltype(t);
    const Logits<T> f = compute_logits<T>(logits, targets, shard);
    launch(context(logits), "target_logits", {.blocks = blocks_for(f.rows.count, kThreads)}, target_logits_kernel<T>, f,
           out.device_data<Accumulate<T>>());
  });
}

}  // namespace tessera::cuda
