// Plain attention: matmuls of 64 x 64 tiles by 256 threads with 4 x 4 accumulators each.
//
// Operands pass through shared memory in slabs of 16 inner elements, so the head dim is unlimited. A thread block
// computes 64 columns of a head, so scores are recomputed for every 64 columns. Sums run in the order of the inner dim.
#include <cstdint>
#include <limits>

#include "tensor/cuda/mma.cuh"
#include "tensor/math.h"
#include "tensor/ops/attention/cuda/attention.cuh"

namespace tessera::cuda {

inline constexpr int kTile = 64, kDepth = 16, kMicro = 4;
static_assert(kThreads == kTile * kTile / (kMicro * kMicro));

template <class A>
struct PlainShared {
  A left[kDepth][kTile + 4], right[kDepth][kTile + 4];  // slabs of the operands
  A p[kTile][kTile + 1], ds[kTile][kTile + 1];          // queries x keys
  A of_row[kTile];
};

// Element n of the inner dim and i of the outer dim is data[n * inner_step + i * outer_step] * factor; 0 out of bounds.
template <class T>
struct Factor {
  const T* data;
  int64_t inner_step, outer_step, inner, outer;
  Accumulate<T> factor = 1;

  // Adjacent threads read adjacent elements.
  __device__ void load(Accumulate<T> (&to)[kDepth][kTile + 4], int64_t n0) const {
    const int t = static_cast<int>(threadIdx.x);
    if (inner_step == 1)
      for (int i = t / kDepth; i < kTile; i += kThreads / kDepth) to[t % kDepth][i] = at(n0 + t % kDepth, i);
    else
      for (int n = t / kTile; n < kDepth; n += kThreads / kTile) to[n][t % kTile] = at(n0 + n, t % kTile);
  }
  __device__ Accumulate<T> at(int64_t n, int64_t i) const {
    using A = Accumulate<T>;
    return n < inner && i < outer ? static_cast<A>(data[n * inner_step + i * outer_step]) * factor : A(0);
  }
};

// Rows of a head as an operand whose inner dim runs along or across them.
template <class T>
__device__ Factor<T> along(const T* rows, int64_t stride, int64_t count, int64_t d, Accumulate<T> factor = 1) {
  return {rows, 1, stride, d, count, factor};
}
template <class T>
__device__ Factor<T> across(const T* rows, int64_t stride, int64_t count, int64_t d, Accumulate<T> factor = 1) {
  return {rows, stride, 1, count, d, factor};
}

template <class A>
using Sums = A[kMicro][kMicro];

__device__ inline int first_row() { return static_cast<int>(threadIdx.x) / (kTile / kMicro) * kMicro; }
__device__ inline int first_column() { return static_cast<int>(threadIdx.x) % (kTile / kMicro) * kMicro; }

// sums[r][c] += sum of left(n, row r) * right(n, column c) over n in order.
template <class A, class L, class R>
__device__ void add_matmul(Sums<A>& sums, PlainShared<A>& s, const Factor<L>& left, const Factor<R>& right) {
  const int row = first_row(), column = first_column();
  for (int64_t n0 = 0; n0 < left.inner; n0 += kDepth) {
    __syncthreads();
    left.load(s.left, n0);
    right.load(s.right, n0);
    __syncthreads();
    for (int n = 0; n < kDepth; ++n)
      for (int r = 0; r < kMicro; ++r)
        for (int c = 0; c < kMicro; ++c) sums[r][c] = math::fma(s.left[n][row + r], s.right[n][column + c], sums[r][c]);
  }
}

// One step of the online softmax: the scores in s.p become unnormalized attention weights. Four threads process a
// query's keys.
template <class T>
struct OnlineSoftmax {
  using A = Accumulate<T>;
  static constexpr int kQuarter = kTile / 4;
  A max = -std::numeric_limits<A>::infinity(), sum = 0;

  static __device__ int row() { return static_cast<int>(threadIdx.x) / 4; }
  static __device__ int first_key() { return static_cast<int>(threadIdx.x) % 4 * kQuarter; }

  __device__ void step(PlainShared<A>& s, const AttentionDropout& dropout, DropoutRow keep, int64_t key0) {
    A* const scores = s.p[row()] + first_key();
    A top = max, total = 0;
    for (int j = 0; j < kQuarter; ++j) top = scores[j] > top ? scores[j] : top;
    for (int bits = 1; bits < 4; bits *= 2)
      if (const A other = __shfl_xor_sync(~0u, top, bits); other > top) top = other;
    const A offset = top > -std::numeric_limits<A>::infinity() ? top : A(0), up = static_cast<A>(dropout.up);
    for (int j = 0; j < kQuarter; ++j) {
      A e = math::exp(scores[j] - offset);
      total += e;
      if (dropout.any) e = keep.keeps(key0 + first_key() + j) ? e * up : A(0);
      scores[j] = static_cast<A>(T(e));
    }
    for (int bits = 1; bits < 4; bits *= 2) total += __shfl_xor_sync(~0u, total, bits);
    const A shrink = math::exp(max - offset);
    sum = math::fma(sum, shrink, total);
    max = top;
    if (first_key() == 0) s.of_row[row()] = shrink;
  }
};

// s.p receives the attention weights (probabilities after dropout), s.ds the gradient of the scores, both rounded.
template <class T>
__device__ void gradient_tile(PlainShared<Accumulate<T>>& s, const BackwardCall<T>& call, const TilePlace& at,
                              const TilePlace& of_keys, int query0, int key0) {
  using A = Accumulate<T>;
  const AttentionSizes& n = call.sizes;
  const int queries = n.tq - query0, keys = n.tk - key0;
  Sums<A> p = {}, dp = {};
  add_matmul<A>(p, s, along(call.q.at(at.b, at.h, query0), call.q.row, queries, n.d, call.scale),
                along(call.k.at(of_keys.b, of_keys.h, key0), call.k.row, keys, n.d));
  add_matmul<A>(dp, s, along(call.dout.at(at.b, at.h, query0), call.dout.row, queries, n.d),
                along(call.v.at(of_keys.b, of_keys.h, key0), call.v.row, keys, n.d));
  const A up = static_cast<A>(call.dropout.up);
  for (int r = 0; r < kMicro; ++r) {
    const int i = query0 + first_row() + r;
    const bool inside = i < n.tq;
    const SoftmaxStats<A> stats = inside ? *call.stats.at(n, at.b, at.h, i) : SoftmaxStats<A>{};
    DropoutRow keep = dropout_row(call.dropout, at.b, at.h, i);
    const int start = call.starts.of(at.b, i);
    for (int c = 0; c < kMicro; ++c) {
      const int j = key0 + first_column() + c;
      const A probability = inside && j >= start && n.sees(i, j) ? math::exp(p[r][c] - stats.lse) : A(0);
      A weight = probability, gradient = dp[r][c];
      if (call.dropout.any) {
        const A mask_factor = keep.keeps(j) ? up : A(0);
        weight *= mask_factor;
        gradient *= mask_factor;
      }
      s.p[first_row() + r][first_column() + c] = static_cast<A>(T(weight));
      s.ds[first_row() + r][first_column() + c] = static_cast<A>(T(probability * (gradient - stats.delta)));
    }
  }
}

template <class T>
__device__ void put_sums(const Result<T>& to, const TilePlace& at, const Sums<Accumulate<T>>& sums, int row0, int rows,
                         int column0, int d) {
  for (int r = 0; r < kMicro; ++r)
    for (int c = 0; c < kMicro; ++c)
      if (row0 + first_row() + r < rows && column0 + first_column() + c < d)
        to.put(to.at(at.b, at.h, row0 + first_row() + r) + column0 + first_column() + c, sums[r][c]);
}

namespace {

// First tile of keys visible to any query of the tile.
__device__ int first_tile(const QueryStarts& starts, const TilePlace& at) {
  return start_bounds(starts, at.b, at.tile * kTile, kTile).min_start / kTile * kTile;
}

// One block per 64 queries of a head and 64 of its columns.
template <class T>
__global__ void __launch_bounds__(kThreads) forward_kernel(ForwardCall<T> call) {
  using A = Accumulate<T>;
  auto& s = *dynamic_shared<PlainShared<A>>();
  const AttentionSizes& n = call.sizes;
  const int columns = count_tiles(n.d, kTile), block = static_cast<int>(blockIdx.x), column0 = block % columns * kTile;
  const TilePlace at = TilePlace::of_queries(n, count_tiles(n.tq, kTile), block / columns), keys = at.keys(n);
  const int query0 = at.tile * kTile, visible = n.visible_keys(query0, kTile);
  const int mine = query0 + OnlineSoftmax<T>::row();
  OnlineSoftmax<T> softmax;
  Sums<A> out = {};
  for (int key0 = first_tile(call.starts, at); key0 < visible; key0 += kTile) {
    Sums<A> scores = {};
    add_matmul<A>(scores, s, along(call.q.at(at.b, at.h, query0), call.q.row, n.tq - query0, n.d, call.scale),
                  along(call.k.at(keys.b, keys.h, key0), call.k.row, n.tk - key0, n.d));
    for (int r = 0; r < kMicro; ++r) {
      const int i = query0 + first_row() + r, start = call.starts.of(at.b, i);
      for (int c = 0; c < kMicro; ++c) {
        const int j = key0 + first_column() + c;
        s.p[first_row() + r][first_column() + c] =
            j >= start && n.sees(i, j) ? scores[r][c] : -std::numeric_limits<A>::infinity();
      }
    }
    __syncthreads();
    softmax.step(s, call.dropout, dropout_row(call.dropout, at.b, at.h, mine), key0);
    __syncthreads();
    for (int r = 0; r < kMicro; ++r)
      for (int c = 0; c < kMicro; ++c) out[r][c] *= s.of_row[first_row() + r];
    add_matmul<A>(out, s, Factor<A>{s.p[0], 1, kTile + 1, kTile, kTile},
                  across(call.v.at(keys.b, keys.h, key0) + column0, call.v.row, n.tk - key0, n.d - column0));
  }
  __syncthreads();
  if (softmax.first_key() == 0) {
    s.of_row[softmax.row()] = softmax.sum == 0 ? A(0) : A(1) / softmax.sum;  // 0: no visible key
    if (column0 == 0 && mine < n.tq) call.lse[n.index(at.b, at.h, mine)] = softmax.max + math::log(softmax.sum);
  }
  __syncthreads();
  for (int r = 0; r < kMicro; ++r)
    for (int c = 0; c < kMicro; ++c) out[r][c] *= s.of_row[first_row() + r];
  put_sums<T>(call.out, at, out, query0, n.tq, column0, n.d);
}

// One block per 64 queries of a head and 64 columns of their gradient.
template <class T>
__global__ void __launch_bounds__(kThreads) query_gradient_kernel(BackwardCall<T> call) {
  using A = Accumulate<T>;
  auto& s = *dynamic_shared<PlainShared<A>>();
  const AttentionSizes& n = call.sizes;
  const int columns = count_tiles(n.d, kTile), block = static_cast<int>(blockIdx.x), column0 = block % columns * kTile;
  const TilePlace at = TilePlace::of_queries(n, count_tiles(n.tq, kTile), block / columns), keys = at.keys(n);
  const int query0 = at.tile * kTile, visible = n.visible_keys(query0, kTile);
  Sums<A> dq = {};
  for (int key0 = first_tile(call.starts, at); key0 < visible; key0 += kTile) {
    gradient_tile(s, call, at, keys, query0, key0);
    add_matmul<A>(dq, s, Factor<A>{s.ds[0], 1, kTile + 1, kTile, kTile},
                  across(call.k.at(keys.b, keys.h, key0) + column0, call.k.row, n.tk - key0, n.d - column0));
  }
  for (int r = 0; r < kMicro; ++r)
    for (int c = 0; c < kMicro; ++c) dq[r][c] *= call.scale;
  put_sums<T>(call.dq, at, dq, query0, n.tq, column0, n.d);
}

// One block per 64 keys of a head and 64 columns of the key and value gradients, accumulated over the group's query
// heads in order.
template <class T>
__global__ void __launch_bounds__(kThreads) key_gradient_kernel(BackwardCall<T> call) {
  using A = Accumulate<T>;
  auto& s = *dynamic_shared<PlainShared<A>>();
  const AttentionSizes& n = call.sizes;
  const int columns = count_tiles(n.d, kTile), block = static_cast<int>(blockIdx.x), column0 = block % columns * kTile;
  const TilePlace keys = TilePlace::of_keys(n, count_tiles(n.tk, kTile), block / columns);
  const int key0 = keys.tile * kTile, d = n.d - column0;
  const int past = last_query(call.starts, keys.b, key0 + kTile);
  Sums<A> dk = {}, dv = {};
  for (int member = 0; member < n.group; ++member) {
    const TilePlace at = keys.queries(n, member);
    for (int query0 = n.first_query(key0) / kTile * kTile; query0 < past; query0 += kTile) {
      gradient_tile(s, call, at, keys, query0, key0);
      const int queries = n.tq - query0;
      add_matmul<A>(dv, s, Factor<A>{s.p[0], kTile + 1, 1, kTile, kTile},
                    across(call.dout.at(at.b, at.h, query0) + column0, call.dout.row, queries, d));
      add_matmul<A>(dk, s, Factor<A>{s.ds[0], kTile + 1, 1, kTile, kTile},
                    across(call.q.at(at.b, at.h, query0) + column0, call.q.row, queries, d, call.scale));
    }
  }
  put_sums<T>(call.dk, keys, dk, key0, n.tk, column0, n.d);
  put_sums<T>(call.dv, keys, dv, key0, n.tk, column0, n.d);
}

template <class T>
Grid make_grid(const AttentionSizes& n, int heads, int rows) {
  return {.blocks = int64_t{n.batch} * heads * count_tiles(rows, kTile) * count_tiles(n.d, kTile),
          .shared = static_cast<int>(sizeof(PlainShared<Accumulate<T>>))};
}

}  // namespace

void plain_attention(const AttentionProblem& p, const AttentionResult& result) {
  with_floating(p.q.dtype(), "attention", [&](auto t) {
    using T = decltype(t);
    const auto call = forward_call<T>(p, result);
    launch(context(p.q), "attention", make_grid<T>(call.sizes, call.sizes.heads, call.sizes.tq), forward_kernel<T>,
           call);
  });
}

void plain_attention_backward(const BackwardProblem& p) {
  with_floating(p.of.q.dtype(), "attention_backward", [&](auto t) {
    using T = decltype(t);
    const auto call = backward_call<T>(p);
    Context& c = context(p.of.q);
    launch(c, "attention_backward", make_grid<T>(call.sizes, call.sizes.heads, call.sizes.tq), query_gradient_kernel<T>,
           call);
    launch(c, "attention_backward", make_grid<T>(call.sizes, call.sizes.key_heads, call.sizes.tk),
           key_gradient_kernel<T>, call);
  });
}

}  // namespace tessera::cuda
