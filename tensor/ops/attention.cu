// Attention on a GPU: which kernels take a problem, the dot products that the backward pass begins with, and merging.
#include "tensor/cuda/attention.cuh"
#include "tensor/cuda/cudnn_attention.h"
#include "tensor/cuda/kernel_log.h"
#include "tensor/math.h"

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

// Whether cuDNN is to be asked: all of it in bfloat16, as many queries as keys, nothing dropped. A single query (of a
// text that is written token by token) would need a graph for each length of the cache.
[[maybe_unused]] bool for_cudnn(const AttentionOptions& options, std::initializer_list<const Tensor*> operands) {
  const Tensor& q = **operands.begin();
  if (q.arena()->local<KernelChoice>().attention == AttentionKernels::own || options.dropout > 0 || q.dim(1) < 2 ||
      q.numel() == 0)
    return false;
  for (const Tensor* t : operands)
    if (t->dtype() != DType::bfloat16 || t->dim(1) != q.dim(1) || !starts_well(*t)) return false;
  return true;
}

// delta[b, h, i] = sum over a head's columns of dout * out, by a warp: lane l adds columns l, l + 32, ... in order, and
// the lanes are added in pairs.
template <class T>
__global__ void delta_kernel(AttentionSizes n, Heads<const T> dout, Heads<const T> out, Accumulate<T>* delta) {
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

}  // namespace

const char* attention_kernels(const Tensor& q, const Tensor& k, const Tensor& v) {
  return for_tensor_cores({.scale = 1}, {&q, &k, &v}) ? "tensor cores" : "plain";
}

void attention(const Tensor& q, const Tensor& k, const Tensor& v, const AttentionOptions& options,
               const Attended& result) {
  KernelLog::Attention& log = q.arena()->local<KernelLog>().forward;
  if constexpr (kWithCudnn)
    if (for_cudnn(options, {&q, &k, &v, &result.out}) && cudnn_attention(q, k, v, options, result)) {
      ++log.cudnn;
      return;
    }
  if (for_tensor_cores(options, {&q, &k, &v, &result.out})) {
    ++log.tensor_cores;
    tiled_attention(q, k, v, options, result);
  } else {
    ++log.plain;
    plain_attention(q, k, v, options, result);
  }
}

void attention_backward(const Tensor& dout, const Tensor& q, const Tensor& k, const Tensor& v, const Attended& forward,
                        const AttentionOptions& options, const AttentionGradients& gradients) {
  KernelLog::Attention& log = q.arena()->local<KernelLog>().backward;
  if constexpr (kWithCudnn)
    if (for_cudnn(options, {&q, &k, &v, &forward.out, &dout, &gradients.dq, &gradients.dk, &gradients.dv}) &&
        cudnn_attention_backward(dout, q, k, v, forward, options, gradients)) {
      ++log.cudnn;
      return;
    }
  const Tensor delta = delta_of(dout, forward.out, sizes_of(q, k, options.causal), forward.lse);
  const BackwardProblem problem{dout, q, k, v, forward.lse, delta, options, gradients};
  if (for_tensor_cores(options, {&q, &k, &v, &dout, &gradients.dq, &gradients.dk, &gradients.dv})) {
    ++log.tensor_cores;
    tiled_attention_backward(problem);
  } else {
    ++log.plain;
    plain_attention_backward(problem);
  }
}

}  // namespace tessera::cuda
