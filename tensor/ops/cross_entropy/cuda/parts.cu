// What ranks that share out the vocabulary bring to a loss on a GPU, and what they make of all parts.
#include <algorithm>
#include <limits>

#include "tensor/ops/cross_entropy/cuda/cross_entropy.cuh"
#include "tensor/ops/reduce.h"

namespace tessera::cuda {
namespace {

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
      own = max ? own + exponential_from(part.v[k], top) : std::max(own, static_cast<A>(part.v[k]));
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
  store_loss(f.losses, f.rows, i, own, f.logit[i], f.targets[i] != kIgnoredTarget);
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
