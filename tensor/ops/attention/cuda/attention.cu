// Attention on a GPU: which kernels take a problem, the dot products that the backward pass begins with, and merging.
#include <limits>

#include "tensor/kernels.h"
#include "tensor/math.h"
#include "tensor/ops/attention/cuda/attention.cuh"
#include "tensor/ops/attention/cuda/cudnn_attention.h"

namespace tessera::cuda {
namespace {

// Whether every row begins where 16 bytes may be read at once.
bool starts_well(const Tensor& t) {
  const int64_t size = size_of(t.dtype());
  bool all = reinterpret_cast<uintptr_t>(t.address()) % 16 == 0;
  for (int d = 0; d < 3; ++d) all = all && (t.dim(d) == 1 || t.strides()[d] * size % 16 == 0);
  return all;
}

bool for_tensor_cores(const AttentionOptions& options, std::initializer_list<const Tensor*> operands) {
  for (const Tensor* t : operands)
    if (!starts_well(*t)) return false;
  const Tensor& q = **operands.begin();
  return q.dtype() == DType::bfloat16 && (q.dim(3) == 64 || q.dim(3) == 128) && options.scale > 0;
}

// Whether cuDNN is to be asked: all of it in bfloat16, as many queries as keys, nothing dropped, one document. A single
// query (of a text that is written token by token) would need a graph for each length of the cache.
[[maybe_unused]] bool for_cudnn(const AttentionOptions& options, std::initializer_list<const Tensor*> operands) {
  const Tensor& q = **operands.begin();
  if (q.arena()->local<KernelChoice>().attention == AttentionKernels::own || options.dropout > 0 ||
      options.starts.defined() || q.dim(1) < 2 || q.numel() == 0)
    return false;
  for (const Tensor* t : operands)
    if (t->dtype() != DType::bfloat16 || t->dim(1) != q.dim(1) || !starts_well(*t)) return false;
  return true;
}

// delta[b, h, i] = sum over a head's columns of dout * out, by a warp: lane l adds columns l, l + 32, ... in order, and
// the lanes are added in pairs.
template <class T>
__global__ void delta_kernel(AttentionSizes n, HeadRows<const T> dout, HeadRows<const T> out, Accumulate<T>* delta) {
  using A = Accumulate<T>;
  const int64_t at = (static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) / 32;
  if (at >= int64_t{n.batch} * n.heads * n.tq) return;
  const int64_t b = at / n.tq / n.heads, h = at / n.tq % n.heads, i = at % n.tq;
  const T *const x = dout.at(b, h, i), *const y = out.at(b, h, i);
  A sum = 0;
  for (int64_t c = threadIdx.x % 32; c < n.d; c += 32) sum = math::fma(static_cast<A>(x[c]), static_cast<A>(y[c]), sum);
  for (int bits = 16; bits > 0; bits /= 2) sum += __shfl_xor_sync(~0u, sum, bits);
  if (threadIdx.x % 32 == 0) delta[at] = sum;
}

Tensor delta_of(const Tensor& dout, const Tensor& out, const AttentionSizes& n, const Tensor& lse) {
  Tensor delta = lse.make(lse.shape(), lse.dtype(), Category::workspace);
  with_floating(dout.dtype(), "attention_backward", [&](auto t) {
    using T = decltype(t);
    launch(context(dout), "attention_backward", {.blocks = blocks_for(lse.numel(), kThreads / 32)}, delta_kernel<T>, n,
           heads_of<const T>(dout), heads_of<const T>(out), delta.device_data<Accumulate<T>>());
  });
  return delta;
}

// Of merge_attended(): a warp for each query of each head.
template <class A>
struct Merge {
  HeadRows<A> into, part;
  A *lse, *other;
  int64_t rows, tokens, heads, d;
};

template <class A>
__global__ void merge_attended_kernel(Merge<A> f) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int64_t at = static_cast<int64_t>(blockIdx.x) * (blockDim.x / 32) + threadIdx.x / 32;
  if (at >= f.rows) return;
  const int64_t t = at % f.tokens, h = at / f.tokens % f.heads, b = at / f.tokens / f.heads;
  const A own = f.lse[at], other = f.other[at], top = std::max(own, other);
  if (top == -std::numeric_limits<A>::infinity()) return;  // no key yet: zeros
  const A both = top + math::log(math::exp(own - top) + math::exp(other - top));
  const A mine = math::exp(own - both), theirs = math::exp(other - both);
  A* const y = f.into.at(b, h, t);
  const A* const x = f.part.at(b, h, t);
  for (int64_t c = lane; c < f.d; c += 32) y[c] = math::fma(x[c], theirs, y[c] * mine);
  __syncwarp();  // all have read it
  if (lane == 0) f.lse[at] = both;
}

}  // namespace

const char* attention_kernels(const Tensor& q, const Tensor& k, const Tensor& v) {
  return for_tensor_cores({.scale = 1}, {&q, &k, &v}) ? "tensor cores" : "plain";
}

void attention(const AttentionProblem& p, const Attended& result) {
  KernelLog::Attention& log = p.q.arena()->local<KernelLog>().forward;
  if constexpr (kWithCudnn)
    if (for_cudnn(p.options, {&p.q, &p.k, &p.v, &result.out}) && cudnn_attention(p, result)) {
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

void attention_backward(const AttentionProblem& p, const Tensor& dout, const Attended& forward,
                        const AttentionGradients& gradients) {
  KernelLog::Attention& log = p.q.arena()->local<KernelLog>().backward;
  const auto& [dq, dk, dv] = gradients;
  if constexpr (kWithCudnn)
    if (for_cudnn(p.options, {&p.q, &p.k, &p.v, &forward.out, &dout, &dq, &dk, &dv}) &&
        cudnn_attention_backward(p, dout, forward, gradients)) {
      ++log.cudnn;
      return;
    }
  const Tensor delta = delta_of(dout, forward.out, sizes_of(p), forward.lse);
  const BackwardProblem problem{p, dout, forward.lse, delta, gradients};
  if (for_tensor_cores(p.options, {&p.q, &p.k, &p.v, &dout, &dq, &dk, &dv})) {
    ++log.tensor_cores;
    tiled_attention_backward(problem);
  } else {
    ++log.plain;
    plain_attention_backward(problem);
  }
}

void merge_attended(const Attended& into, const Attended& part) {
  with_floating(into.lse.dtype(), "merge_attended", [&](auto t) {
    using A = Accumulate<decltype(t)>;
    const Merge<A> f{.into = heads_of<A>(into.out),
                     .part = heads_of<A>(part.out),
                     .lse = into.lse.device_data<A>(),
                     .other = part.lse.device_data<A>(),
                     .rows = into.lse.numel(),
                     .tokens = into.out.dim(1),
                     .heads = into.out.dim(2),
                     .d = into.out.dim(3)};
    launch(context(into.out), "merge_attended", {.blocks = blocks_for(f.rows, kThreads / 32)}, merge_attended_kernel<A>,
           f);
  });
}

}  // namespace tessera::cuda
