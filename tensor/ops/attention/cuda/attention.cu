// Attention on a GPU: kernel selection, the per-query statistics of the backward pass, and merging.
#include <algorithm>
#include <cstdint>
#include <initializer_list>
#include <limits>

#include "tensor/kernels.h"
#include "tensor/math.h"
#include "tensor/ops/attention/cuda/attention.cuh"
#include "tensor/ops/attention/cuda/cudnn_attention.h"

namespace tessera::cuda {
namespace {

bool for_tensor_cores(const AttentionOptions& options, std::initializer_list<const Tensor*> operands) {
  for (const Tensor* t : operands)
    if (!rows_are_aligned(*t)) return false;
  const Tensor& q = **operands.begin();
  return q.dtype() == DType::bfloat16 && (q.dim(3) == 64 || q.dim(3) == 128) && options.scale > 0;
}

// Whether to try cuDNN: all operands in bfloat16, equal numbers of queries and keys under the causal mask, no dropout,
// one document. A single query (decoding) would need a graph for each cache length.
[[maybe_unused]] bool for_cudnn(const AttentionProblem& p, std::initializer_list<const Tensor*> operands) {
  if (!asks_cudnn(p.q, p.options) || p.tq < 2 || (p.options.causal && p.tq != p.tk) || p.q.numel() == 0) return false;
  for (const Tensor* t : operands)
    if (t->dtype() != DType::bfloat16) return false;
  return true;
}

// One warp per query and head: lane l adds columns l, l + 32, ... of dout * out in order; lanes are added in pairs.
template <class T>
struct ComputeStats {
  AttentionSizes sizes;
  HeadRows<const T> dout, out;
  const Accumulate<T>* lse;
  Accumulate<T> factor;
  int padded;
  SoftmaxStats<Accumulate<T>>* stats;
};

template <class T>
__global__ void softmax_stats_kernel(ComputeStats<T> f) {
  using A = Accumulate<T>;
  const AttentionSizes& n = f.sizes;
  const int64_t at = (static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) / 32;
  if (at >= int64_t{n.batch} * n.heads * f.padded) return;
  const int64_t b = at / f.padded / n.heads, h = at / f.padded % n.heads, i = at % f.padded;
  SoftmaxStats<A> stats{std::numeric_limits<A>::infinity(), A(0)};
  if (i < n.tq) {
    const T *const x = f.dout.at(b, h, i), *const y = f.out.at(b, h, i);
    A sum = 0;
    for (int64_t c = threadIdx.x % 32; c < n.d; c += 32)
      sum = math::fma(static_cast<A>(x[c]), static_cast<A>(y[c]), sum);
    for (int bits = 16; bits > 0; bits /= 2) sum += __shfl_xor_sync(~0u, sum, bits);
    const A lse = f.lse[at / f.padded * n.tq + i];
    if (lse != -std::numeric_limits<A>::infinity()) stats = {lse * f.factor, sum};
  }
  if (threadIdx.x % 32 == 0) f.stats[at] = stats;
}

// (B, H, padded, 2): SoftmaxStats for the backward kernels.
Tensor compute_stats(const AttentionProblem& p, const Tensor& dout, const AttentionResult& forward, bool tiles) {
  const AttentionSizes n = attention_sizes(p);
  const int padded = tiles ? count_tiles(n.tq, kQueryPadding) * kQueryPadding : n.tq;
  const Tensor stats = forward.lse.make({n.batch, n.heads, padded, 2}, forward.lse.dtype(), Category::workspace);
  with_floating(dout.dtype(), "attention_backward", [&](auto t) {
    using T = decltype(t);
    using A = Accumulate<T>;
    const ComputeStats<T> f{.sizes = n,
                            .dout = count_heads<const T>(dout),
                            .out = count_heads<const T>(forward.out),
                            .lse = forward.lse.device_data<A>(),
                            .factor = tiles ? A(kLog2E) : A(1),
                            .padded = padded,
                            .stats = reinterpret_cast<SoftmaxStats<A>*>(stats.device_data<A>())};
    launch(context(dout), "attention_backward", {.blocks = blocks_for(stats.numel() / 2, kThreads / 32)},
           softmax_stats_kernel<T>, f);
  });
  return stats;
}

template <class T>
struct Merge {
  Result<T> into, tile;
  Accumulate<T>* lse;
  const Accumulate<T>* other;
  int64_t rows, tokens, heads, d;
  int64_t lse_batch, lse_head;  // strides of lse; `other` is contiguous
};

template <class T>
__global__ void merge_attention_kernel(Merge<T> f) {
  using A = Accumulate<T>;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int64_t at = static_cast<int64_t>(blockIdx.x) * (blockDim.x / 32) + threadIdx.x / 32;
  if (at >= f.rows) return;
  const int64_t t = at % f.tokens, h = at / f.tokens % f.heads, b = at / f.tokens / f.heads;
  A* const lse = f.lse + b * f.lse_batch + h * f.lse_head + t;
  const A own = *lse, other = f.other[at], top = std::max(own, other);
  if (top == -std::numeric_limits<A>::infinity()) return;  // no visible key yet: zeros
  const A both = top + math::log(math::exp(own - top) + math::exp(other - top));
  const A mine = math::exp(own - both), theirs = math::exp(other - both);
  const int64_t to = f.into.at(b, h, t), from = f.tile.at(b, h, t);
  for (int64_t c = lane; c < f.d; c += 32)
    f.into.put(to + c, math::fma(f.tile.get(from + c), theirs, f.into.get(to + c) * mine));
  __syncwarp();  // all lanes have read *lse
  if (lane == 0) *lse = both;
}

}  // namespace

const char* attention_kernels(const Tensor& q, const Tensor& k, const Tensor& v) {
  return for_tensor_cores({.scale = 1}, {&q, &k, &v}) ? "tensor cores" : "plain";
}

void attention(const AttentionProblem& p, const AttentionResult& result) {
  KernelLog::Attention& log = p.q.arena()->local<KernelLog>().forward;
  if constexpr (kWithCudnn)
    if (for_cudnn(p, {&p.q, &p.k, &p.v, &result.out}) && cudnn_attention(p, result)) {
      ++log.cudnn;
      return;
    }
  if (for_tensor_cores(p.options, {&p.q, &p.k, &p.v, &result.out})) {
    ++log.tensor_cores;
    tiled_attention(p, result);
  } else {
    ++log.plain;
    plain_attention(p, result);
  }
}

void attention_backward(const AttentionProblem& p, const Tensor& dout, const AttentionResult& forward,
                        const AttentionGradients& gradients) {
  KernelLog::Attention& log = p.q.arena()->local<KernelLog>().backward;
  const auto& [dq, dk, dv] = gradients;
  if constexpr (kWithCudnn)
    if (for_cudnn(p, {&p.q, &p.k, &p.v, &forward.out, &dout, &dq, &dk, &dv}) &&
        cudnn_attention_backward(p, dout, forward, gradients)) {
      ++log.cudnn;
      return;
    }
  const bool tiles = for_tensor_cores(p.options, {&p.q, &p.k, &p.v, &dout, &dq, &dk, &dv});
  const Tensor stats = compute_stats(p, dout, forward, tiles);
  const BackwardProblem problem{p, dout, stats, gradients};
  if (tiles) {
    ++log.tensor_cores;
    tiled_attention_backward(problem);
  } else {
    ++log.plain;
    plain_attention_backward(problem);
  }
}

void merge_attention(const AttentionResult& into, const AttentionResult& tile) {
  const DType wide = into.lse.dtype(), narrow = into.out.dtype() == wide ? tile.out.dtype() : into.out.dtype();
  with_floating(narrow, "merge_attention", [&](auto t) {
    using T = decltype(t);
    using A = Accumulate<T>;
    const Merge<T> f{.into = collect_result<T>(into.out),
                     .tile = collect_result<T>(tile.out),
                     .lse = into.lse.device_data<A>(),
                     .other = tile.lse.device_data<A>(),
                     .rows = into.lse.numel(),
                     .tokens = into.out.dim(1),
                     .heads = into.out.dim(2),
                     .d = into.out.dim(3),
                     .lse_batch = into.lse.strides()[0],
                     .lse_head = into.lse.strides()[1]};
    launch(context(into.out), "merge_attention", {.blocks = blocks_for(f.rows, kThreads / 32)},
           merge_attention_kernel<T>, f);
  });
}

}  // namespace tessera::cuda
