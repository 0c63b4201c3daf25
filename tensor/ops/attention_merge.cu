// Merging attention on a GPU: a warp for each query of each head.
#include "tensor/cuda/attention_merge.h"
#include "tensor/cuda/launch.cuh"
#include "tensor/math.h"

namespace tessera::cuda {
namespace {

// The rows of (B, T, H, D), whose last dim runs on.
template <class A>
struct HeadRows {
  A* data;
  int64_t batch, token, head;  // strides
  __device__ A* row(int64_t b, int64_t t, int64_t h) const { return data + b * batch + t * token + h * head; }
};

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
  const A both = top + math::log(math::exp(own - top) + math::exp(other - top));
  const A mine = math::exp(own - both), theirs = math::exp(other - both);
  A* const y = f.into.row(b, t, h);
  const A* const x = f.part.row(b, t, h);
  for (int64_t c = lane; c < f.d; c += 32) y[c] = math::fma(x[c], theirs, y[c] * mine);
  __syncwarp();  // all have read it
  if (lane == 0) f.lse[at] = both;
}

template <class A>
HeadRows<A> head_rows(const Tensor& t) {
  return {t.device_data<A>(), t.strides()[0], t.strides()[1], t.strides()[2]};
}

}  // namespace

void merge_attended(const Attended& into, const Attended& part) {
  with_floating(into.lse.dtype(), "merge_attended", [&](auto t) {
    using A = Accumulate<decltype(t)>;
    const Merge<A> f{.into = head_rows<A>(into.out),
                     .part = head_rows<A>(part.out),
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
