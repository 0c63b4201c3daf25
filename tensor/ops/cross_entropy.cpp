// CPU cross-entropy: rows are independent and split over threads.
#include "tensor/ops/cross_entropy.h"

#include <algorithm>
#include <cstdint>
#include <limits>
#include <string>

#include "tensor/cpu/loops.h"
#include "tensor/math.h"
#include "tensor/ops/elementwise.h"

namespace tessera {

namespace {

// Number of target tokens in targets int32 (N) in host memory. Throws Error naming the row of an invalid target.
int64_t check_targets(const Tensor& targets, int64_t vocab) {
  int64_t count = 0;
  const int32_t* const target = targets.data<int32_t>();
  for (int64_t i = 0; i < targets.dim(0); ++i) {
    if (target[i] == kIgnoredTarget) continue;
    if (target[i] < 0 || target[i] >= vocab)
      throw Error("[cross_entropy] target " + std::to_string(target[i]) + " of row " + std::to_string(i) +
                  " is outside [0, " + std::to_string(vocab) + ")");
    ++count;
  }
  return count;
}

constexpr int64_t kVocabBlock = 4096;  // entries: 16 KiB of float32, which fit in L1

// Sum of exp(logit - top) over a row; chunks of the vocabulary, one per leaf, are added by a binary tree.
template <class A, class T>
inline A sum_exp_of_leaves(const T* row, int64_t vocab, A top, int64_t leaves) {
  A sums[kLeaves];
  for (int64_t leaf = 0; leaf < leaves; ++leaf) {
    const int64_t begin = leaf * vocab / leaves, end = (leaf + 1) * vocab / leaves;
    sums[leaf] = cpu::lane_sum<A>(
        end - begin, [row, begin, top](int64_t j) { return math::exp(static_cast<A>(row[begin + j]) - top); });
  }
  for (int64_t step = 1; step < leaves; step *= 2)
    for (int64_t leaf = 0; leaf < leaves; leaf += 2 * step) sums[leaf] += sums[leaf + step];
  return sums[0];
}

template <class A, class T>
inline A max_of_row(const T* row, int64_t vocab) {
  return cpu::lane_max<A>(vocab, -std::numeric_limits<A>::infinity(),
                          [row](int64_t j) { return static_cast<A>(row[j]); });
}

// As joined_cross_entropy() of the shards.
template <class A, class T>
inline A row_lse_of_leaves(const T* row, int64_t vocab) {
  const A top = max_of_row<A>(row, vocab);
  return top + math::log(sum_exp_of_leaves(row, vocab, top, kLeaves));
}

template <class A, class T>
inline A row_lse(const T* row, int64_t vocab) {
  A max = -std::numeric_limits<A>::infinity(), sum = 0;
  for (int64_t v = 0; v < vocab; v += kVocabBlock) {
    const T* const block = row + v;
    const int64_t n = std::min(kVocabBlock, vocab - v);
    const A top = cpu::lane_max<A>(n, max, [=](int64_t j) { return static_cast<A>(block[j]); });
    const A here = cpu::lane_sum<A>(n, [=](int64_t j) { return math::exp(static_cast<A>(block[j]) - top); });
    sum = math::fma(sum, math::exp(max - top), here);
    max = top;
  }
  return max + math::log(sum);
}

void check_shapes(const Tensor& logits, const Tensor& targets) {
  if (logits.ndim() != 2 || targets.ndim() != 1 || targets.dim(0) != logits.dim(0) || targets.dtype() != DType::int32)
    throw Error("[cross_entropy] logits are " + logits.describe() + ", targets are " + targets.describe() +
                "; expected (N, V) and int32 (N)");
}

int64_t full_vocab(const Tensor& logits, const VocabShard& s) { return s.total > 0 ? s.total : logits.dim(1); }

CrossEntropy with_sum(CrossEntropy out, const Tensor& like, double total) {
  out.loss_sum = total;
  out.sum = like.make({}, DType::float64);
  *out.sum.data<double>() = total;
  return out;
}

// `total` is the loss of previous rows: row blocks are bitwise identical to one call.
CrossEntropy cross_entropy_on_cpu(const Tensor& logits, const Tensor& targets, double total) {
  CrossEntropy out;
  const int64_t n = logits.dim(0), vocab = logits.dim(1);
  out.count = static_cast<double>(check_targets(targets, vocab));
  with_floating(logits.dtype(), "cross_entropy", [&]<class T>(T) {
    using A = Accumulate<T>;
    out.lse = logits.make({n}, kDTypeOf<A>);
    const T* const x = logits.data<T>();
    A* const lse = out.lse.template data<A>();
    if (adds_by_leaves(logits))
      cpu::for_rows(n, vocab, [=](int64_t i) { lse[i] = row_lse_of_leaves<A>(x + i * vocab, vocab); });
    else
      cpu::for_rows(n, vocab, [=](int64_t i) { lse[i] = row_lse<A>(x + i * vocab, vocab); });
    const int32_t* const target = targets.data<int32_t>();
    for (int64_t i = 0; i < n; ++i)
      if (target[i] != kIgnoredTarget)
        total += static_cast<double>(lse[i]) - static_cast<double>(static_cast<A>(x[i * vocab + target[i]]));
  });
  return with_sum(std::move(out), logits, total);
}

CrossEntropy deferred(const RowLosses& made) {
  const Tensor sum = made.totals.select(0, 0);
  return {DeviceScalar(sum), DeviceScalar(made.totals.select(0, 1)), made.lse, sum};
}

void backward_on_cpu(const Tensor& out, const Scored& of, const GradientScale& factors, const VocabShard& shard) {
  const double scale = factors.times.defined() ? factors.number * factors.times.item<double>() : factors.number;
  const Tensor& logits = of.logits;
  const int64_t vocab = logits.dim(1), first = shard.first;
  check_targets(of.targets, full_vocab(logits, shard));
  with_floating(logits.dtype(), "cross_entropy_backward", [&]<class T>(T) {
    using A = Accumulate<T>;
    const T* const x = logits.data<T>();
    T* const dx = out.data<T>();
    const A* const log_sum = of.lse.data<A>();
    const int32_t* const target = of.targets.data<int32_t>();
    const A factor = static_cast<A>(scale);
    cpu::for_rows(logits.dim(0), vocab, [=](int64_t i) {
      const T* const row = x + i * vocab;
      T* const to = dx + i * vocab;
      const A shift = log_sum[i], by = target[i] == kIgnoredTarget ? A(0) : factor;
      const int64_t at = target[i] == kIgnoredTarget ? -1 : target[i] - first;
      const bool here = at >= 0 && at < vocab;
      // Computed from the logit before it may be overwritten, and rounded once.
      const A own = here ? math::exp(static_cast<A>(row[at]) - shift) - A(1) : A(0);
#pragma GCC ivdep
      for (int64_t j = 0; j < vocab; ++j) to[j] = T(math::exp(static_cast<A>(row[j]) - shift) * by);
      if (here) to[at] = T(own * factor);
    });
  });
}

}  // namespace

Tensor targets_on_device(const Tensor& logits, const Tensor& targets, int64_t vocab) {
  if (targets.device() == logits.device()) return targets;
  check_shapes(logits, targets);
  check_targets(targets.on_host().contiguous(), vocab);
  return targets.to(logits.arena());
}

CrossEntropy cross_entropy(const Tensor& logits_any, const Tensor& targets_any) {
  check_shapes(logits_any, targets_any);
  const Tensor logits = logits_any.contiguous(), targets = targets_any.contiguous();
  return on_device(
      logits.device(), [&] { return cross_entropy_on_cpu(logits, targets, 0); },
      [&] { return deferred(cuda::cross_entropy(logits, targets)); });
}

CrossEntropy cross_entropy_in_place(Tensor& logits, const Tensor& targets_any, double scale) {
  check_shapes(logits, targets_any);
  const Tensor targets = targets_any.contiguous();
  const auto on_cpu = [&] {
    CrossEntropy out = cross_entropy_on_cpu(logits, targets, 0);
    backward_on_cpu(logits, {logits, targets, out.lse}, scale, {});
    return out;
  };
  return on_device(logits.device(), on_cpu,
                   [&] { return deferred(cuda::cross_entropy_in_place(logits, targets, scale)); });
}

void scale_rows_(Tensor& x, const Tensor& factor) {
  on_device(
      x.device(), [&] { scale_(x, factor.item<double>()); }, [&] { cuda::multiply_by(x, factor); });
}

Tensor cross_entropy_backward(Tensor&& logits_any, const Tensor& targets_any, const Tensor& lse,
                              const GradientScale& scale, const VocabShard& shard) {
  check_shapes(logits_any, targets_any);
  const Tensor logits = logits_any.contiguous(), targets = targets_any.contiguous();
  logits_any = Tensor();
  Tensor out = logits.unique() ? logits : logits.make(logits.shape());
  const Scored of{logits, targets, lse};
  on_device(
      logits.device(), [&] { backward_on_cpu(out, of, scale, shard); },
      [&] { cuda::cross_entropy_backward(out, of, scale, shard); });
  return out;
}

namespace {

template <class F, class Cuda>
Tensor over_rows(const Tensor& logits_any, const char* op, const F& f, const Cuda& on_gpu) {
  if (logits_any.ndim() != 2)
    throw Error(std::string("[") + op + "] logits are " + logits_any.describe() + "; expected (N, V)");
  const Tensor logits = logits_any.contiguous();
  const int64_t n = logits.dim(0), vocab = logits.dim(1);
  return with_floating(logits.dtype(), op, [&]<class T>(T) {
    using A = Accumulate<T>;
    Tensor out = logits.make({n}, kDTypeOf<A>);
    const auto on_cpu = [&] {
      const T* const x = logits.data<T>();
      A* const y = out.template data<A>();
      cpu::for_rows(n, vocab, [&](int64_t i) { y[i] = f(x + i * vocab, i, A{}); });
    };
    on_device(logits.device(), on_cpu, [&] { on_gpu(out, logits); });
    return out;
  });
}

CrossEntropy joined_on_cpu(const Tensor& max, const Tensor& sum_exp, const Tensor& own, const Tensor& targets) {
  const int64_t n = max.numel();
  CrossEntropy out;
  double total = 0, count = 0;
  out.lse = max.make({n}, max.dtype());
  const int32_t* const target = targets.data<int32_t>();
  with_floating(max.dtype(), "cross_entropy", [&](auto t) {
    using A = Accumulate<decltype(t)>;
    const A *const top = max.data<A>(), *const sum = sum_exp.data<A>(), *const logit = own.data<A>();
    A* const lse = out.lse.template data<A>();
    for (int64_t i = 0; i < n; ++i) {
      lse[i] = top[i] + math::log(sum[i]);
      if (target[i] == kIgnoredTarget) continue;
      total += static_cast<double>(lse[i]) - static_cast<double>(logit[i]);
      ++count;
    }
  });
  out.count = count;
  return with_sum(std::move(out), max, total);
}

}  // namespace

Tensor row_max(const Tensor& logits) {
  const int64_t vocab = logits.dim(-1);
  const auto top = [=]<class T, class A>(const T* row, int64_t, A) {
    return cpu::lane_max<A>(vocab, -std::numeric_limits<A>::infinity(),
                            [=](int64_t j) { return static_cast<A>(row[j]); });
  };
  return over_rows(logits, "row_max", top, [](const Tensor& out, const Tensor& x) { cuda::row_max(out, x); });
}

Tensor row_sum_exp(const Tensor& logits, const Tensor& max, int64_t leaves) {
  const int64_t vocab = logits.dim(-1);
  max.check_size(logits.dim(0));
  const auto sum = [&]<class T, class A>(const T* row, int64_t i, A) {
    const A top = max.data<A>()[i];
    if (leaves > 0) return sum_exp_of_leaves(row, vocab, top, leaves);
    return cpu::lane_sum<A>(vocab, [=](int64_t j) { return math::exp(static_cast<A>(row[j]) - top); });
  };
  return over_rows(logits, "row_sum_exp", sum,
                   [&](const Tensor& out, const Tensor& x) { cuda::row_sum_exp(out, x, max); });
}

Tensor target_logits(const Tensor& logits, const Tensor& targets_any, const VocabShard& shard) {
  check_shapes(logits, targets_any);
  const Tensor targets = targets_any.contiguous();
  if (targets.device() == Device::cpu) check_targets(targets, full_vocab(logits, shard));
  const int64_t vocab = logits.dim(1);
  const auto of_target = [&]<class T, class A>(const T* row, int64_t i, A) {
    const int32_t target = targets.data<int32_t>()[i];
    const int64_t at = target == kIgnoredTarget ? -1 : target - shard.first;
    return at >= 0 && at < vocab ? static_cast<A>(row[at]) : A(0);
  };
  return over_rows(logits, "target_logits", of_target,
                   [&](const Tensor& out, const Tensor& x) { cuda::target_logits(out, x, targets, shard); });
}

CrossEntropy joined_cross_entropy(const Tensor& max, const Tensor& sum_exp, const Tensor& own,
                                  const Tensor& targets_any) {
  const Tensor targets = targets_any.contiguous();
  return on_device(
      max.device(), [&] { return joined_on_cpu(max, sum_exp, own, targets); },
      [&] { return deferred(cuda::joined_cross_entropy(max, sum_exp, own, targets)); });
}

namespace {

constexpr int64_t kMinRows = 32;  // per block: with fewer rows, reading w dominates
// Bytes of w's gradient computed before each accumulation: a fraction of the shared cache.
constexpr int64_t kFreshBytes = int64_t{4} << 20;

// dw = or += dy^T x.
void weight_grad_of_block(Tensor& dw, const Tensor& dy, const Tensor& x, bool first) {
  if (first) return linear_weight_grad(dw, dy, x);
  const int64_t entries = dw.dim(0), row = dw.dim(1) * element_size(dw.dtype());
  const int64_t max_rows = std::clamp<int64_t>(kFreshBytes / std::max<int64_t>(row, 1), 1, entries);
  const Tensor buffer = dw.make({max_rows, dw.dim(1)}, dw.dtype(), Category::workspace);
  for (int64_t at = 0; at < entries; at += max_rows) {
    const int64_t n = std::min(max_rows, entries - at);
    Tensor fresh = buffer.narrow(0, 0, n), total = dw.narrow(0, at, n);
    matmul_into(fresh, dy.narrow(1, at, n).transpose(0, 1), x);
    add_(total, fresh);
  }
}

void add_block(LinearCrossEntropy& total, const Tensor& x, const Tensor& w, const Tensor& targets, double scale,
               Tensor* dx, Tensor* dw, bool first, PackedWeights* packs) {
  Tensor logits = linear(x, w, {}, packs);
  const CrossEntropy r = cross_entropy_on_cpu(logits, targets, total.loss_sum);
  total.loss_sum = r.loss_sum;
  total.count += r.count;
  if (!dx && !dw) return;
  const Tensor gradient = cross_entropy_backward(std::move(logits), targets, r.lse, scale);
  if (dx) linear_input_grad_into(*dx, gradient, w, packs);
  if (dw) weight_grad_of_block(*dw, gradient, x, first);
}

}  // namespace

RowBlocks row_blocks(const Tensor& x, const Tensor& w, int64_t max_bytes) {
  const int64_t rows = x.numel() / std::max<int64_t>(x.dim(-1), 1);
  const int64_t row_bytes = std::max<int64_t>(w.dim(0) * element_size(x.dtype()), 1);
  const int64_t max_rows = std::max(kMinRows, max_bytes / row_bytes);
  const bool on_gpu = x.device() == Device::cuda || dry_run_on_gpu(x);
  // Leaves of tokens are not divided into blocks.
  if (rows <= max_rows || on_gpu || adds_by_leaves(x)) return {rows, std::max<int64_t>(rows, 1)};
  const int64_t min_blocks = (rows + max_rows - 1) / max_rows;
  for (int64_t blocks = min_blocks; blocks < 2 * min_blocks; ++blocks)
    if (rows % blocks == 0) return {rows, rows / blocks};
  return {rows, (rows + min_blocks - 1) / min_blocks};
}

LinearCrossEntropy linear_cross_entropy(const Tensor& x_any, const Tensor& w, const Tensor& targets_any, double scale,
                                        Tensor* dx, Tensor* dw, const RowBlocks& blocks, PackedWeights* packs) {
  const Tensor x = x_any.contiguous(), targets = targets_any.contiguous();
  if (x.ndim() != 2 || w.ndim() != 2 || targets.ndim() != 1 || targets.dim(0) != x.dim(0) ||
      targets.dtype() != DType::int32)
    throw Error("[linear_cross_entropy] x is " + x.describe() + ", w is " + w.describe() + ", targets are " +
                targets.describe() + "; expected (N, C), (V, C) and int32 (N)");
  check_targets(targets, w.dim(0));
  LinearCrossEntropy out;
  blocks.for_each([&](int64_t at, int64_t n) {
    Tensor dx_here = dx ? dx->narrow(0, at, n) : Tensor();
    add_block(out, x.narrow(0, at, n), w, targets.narrow(0, at, n), scale, dx ? &dx_here : nullptr, dw, at == 0, packs);
  });
  out.sum = x.make({}, DType::float64);
  *out.sum.data<double>() = out.loss_sum;
  return out;
}

Tensor linear_by_rows(const Tensor& x, const Tensor& w, const RowBlocks& blocks, PackedWeights* packs) {
  if (blocks.one()) return linear(x, w, {}, packs);
  const Tensor rows = x.contiguous().flat_rows();
  const Tensor y = x.make({rows.dim(0), w.dim(0)});
  blocks.for_each([&](int64_t at, int64_t n) {
    Tensor here = y.narrow(0, at, n);
    linear_into(here, rows.narrow(0, at, n), w, {}, packs);
  });
  return y.reshape(x.shape().with_last(w.dim(0)));
}

Tensor linear_input_grad_by_rows(const Tensor& dy, const Tensor& w, const RowBlocks& blocks, PackedWeights* packs) {
  if (blocks.one()) return linear_input_grad(dy, w, packs);
  const Tensor rows = dy.contiguous().flat_rows();
  const Tensor dx = dy.make({rows.dim(0), w.dim(1)});
  blocks.for_each([&](int64_t at, int64_t n) {
    Tensor here = dx.narrow(0, at, n);
    linear_input_grad_into(here, rows.narrow(0, at, n), w, packs);
  });
  return dx.reshape(dy.shape().with_last(w.dim(1)));
}

void linear_weight_grad_by_rows(Tensor& dw, const Tensor& dy_any, const Tensor& x_any, const RowBlocks& blocks) {
  if (blocks.one()) return linear_weight_grad(dw, dy_any, x_any);
  const Tensor dy = dy_any.contiguous().flat_rows(), x = x_any.contiguous().flat_rows();
  const DType wide = accum_dtype(dy.dtype());
  // Round once, after all blocks.
  Tensor total = dw.dtype() == wide ? dw : dw.make(dw.shape(), wide, Category::workspace);
  blocks.for_each(
      [&](int64_t at, int64_t n) { weight_grad_of_block(total, dy.narrow(0, at, n), x.narrow(0, at, n), at == 0); });
  if (dw.dtype() != wide) dw.copy_from(total);
}

}  // namespace tessera
