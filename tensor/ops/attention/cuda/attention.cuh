// Operands and tile positions, shared by all attention kernels.
#pragma once
#include <algorithm>
#include <cstdint>
#include <string>
#include <type_traits>

#include "tensor/cuda/launch.cuh"
#include "tensor/ops/attention/attention.h"

namespace tessera::cuda {

inline constexpr float kLog2E = 1.44269504f;

// (B, T, H, D) with a contiguous last dim.
template <class T>
struct HeadRows {
  T* data = nullptr;
  int64_t batch = 0, row = 0, head = 0;  // in elements
  __device__ T* at(int64_t b, int64_t h, int64_t i) const { return data + b * batch + h * head + i * row; }
};

template <class T>
HeadRows<T> count_heads(const Tensor& t) {
  return {reinterpret_cast<T*>(t.device_data<std::remove_const_t<T>>()), t.strides()[0], t.strides()[1],
          t.strides()[2]};
}

template <class T>
struct Result {
  using A = Accumulate<T>;
  T* narrow = nullptr;
  A* wide = nullptr;  // exactly one pointer is set
  int64_t batch = 0, row = 0, head = 0;
  __device__ void put(int64_t at, A value) const {
    if (wide)
      wide[at] = value;
    else
      narrow[at] = converted<T>(value);
  }
  __device__ A get(int64_t at) const { return wide ? wide[at] : static_cast<A>(narrow[at]); }
  __device__ int64_t at(int64_t b, int64_t h, int64_t i) const { return b * batch + h * head + i * row; }
};

template <class T>
Result<T> collect_result(const Tensor& t) {
  Result<T> r{.batch = t.strides()[0], .row = t.strides()[1], .head = t.strides()[2]};
  if (t.dtype() == kDTypeOf<T>)
    r.narrow = t.device_data<T>();
  else
    r.wide = t.device_data<Accumulate<T>>();
  return r;
}

// At most 2^30, for 32-bit arithmetic.
struct AttentionSizes {
  int batch = 0, tq = 0, tk = 0, heads = 0, d = 0;
  int key_heads = 0, group = 1;  // heads = key_heads * group
  bool causal = false;

  constexpr int offset() const { return tk - tq; }  // last key visible to query 0
  constexpr bool sees(int query, int key) const { return key < tk && (!causal || key <= query + offset()); }
  constexpr int visible_keys(int query0, int queries) const {
    const int visible = query0 + queries + offset();
    return causal && visible < tk ? visible : tk;
  }
  // First query that sees a key at or after key0.
  constexpr int first_query(int key0) const { return causal && key0 > offset() ? key0 - offset() : 0; }
  // Index in a tensor (B, H, Tq).
  constexpr int64_t index(int b, int h, int query) const { return (int64_t{b} * heads + h) * tq + query; }
};

inline AttentionSizes attention_sizes(const AttentionProblem& p) {
  const auto size = [](int64_t n) {
    if (n > int64_t{1} << 30)
      throw Error("[attention] a dim has size " + std::to_string(n) + "; expected at most 2^30 on a GPU");
    return static_cast<int>(n);
  };
  return {.batch = size(p.batch),
          .tq = size(p.tq),
          .tk = size(p.tk),
          .heads = size(p.heads),
          .d = size(p.d),
          .key_heads = size(p.key_heads),
          .group = size(p.group()),
          .causal = p.options.causal};
}

// Bounds on the starts of `count` queries, computed by a full warp.
__device__ inline QueryStarts::Bounds start_bounds(const QueryStarts& starts, int b, int query0, int count) {
  if (!starts.any()) return {};
  QueryStarts::Bounds found{1 << 30, 0};
  for (int query = query0 + static_cast<int>(threadIdx.x) % 32; query < query0 + count && query < starts.queries;
       query += 32) {
    const int start = starts.of(b, query);
    found.min_start = std::min(found.min_start, start);
    found.max_start = std::max(found.max_start, start);
  }
  for (int bits = 16; bits > 0; bits /= 2) {
    found.min_start = std::min(found.min_start, __shfl_xor_sync(~0u, found.min_start, bits));
    found.max_start = std::max(found.max_start, __shfl_xor_sync(~0u, found.max_start, bits));
  }
  return {std::max(found.min_start, 0), found.max_start};
}
// One past the last query that sees a key before `end`; computed by a full warp.
__device__ inline int last_query(const QueryStarts& starts, int b, int end) {
  if (!starts.any()) return starts.queries;
  int past = 0;
  for (int query = static_cast<int>(threadIdx.x) % 32; query < starts.queries; query += 32)
    if (starts.of(b, query) < end) past = query + 1;
  for (int bits = 16; bits > 0; bits /= 2) past = std::max(past, __shfl_xor_sync(~0u, past, bits));
  return past;
}

// Copies its inputs, so that the kernel's parameters stay in constant memory.
struct DropoutRow {
  Philox random;
  uint64_t step, first;
  float probability;
  uint64_t cached = ~uint64_t{0};
  uint32_t w0 = 0, w1 = 0, w2 = 0, w3 = 0;
  __device__ bool keeps(int64_t key) {
    const uint64_t at = first + static_cast<uint64_t>(key);
    if (at >> 2 != cached) {
      const Philox::Block words = random(cached = at >> 2, step);
      w0 = words[0], w1 = words[1], w2 = words[2], w3 = words[3];
    }
    const uint32_t low = at & 1 ? w1 : w0, high = at & 1 ? w3 : w2;
    return Philox::to_uniform(at & 2 ? high : low) >= probability;
  }
};
__device__ inline DropoutRow dropout_row(const AttentionDropout& d, int64_t b, int64_t h, int64_t query) {
  return {.random = d.random,
          .step = d.step_on_gpu ? *d.step_on_gpu : d.step,
          .first = d.index(b, h, query),
          .probability = d.probability};
}

// For the backward pass: log-sum-exp times a factor, and delta, the dot product of dout and out. Padding and queries
// without keys have an infinite lse: exp(x - infinity) = 0.
template <class A>
struct SoftmaxStats {
  A lse, delta;
};
// (B, H, padded): tensor-core kernels copy full tiles of queries.
template <class A>
struct SoftmaxStatsView {
  const SoftmaxStats<A>* data;
  int padded;
  __device__ const SoftmaxStats<A>* at(const AttentionSizes& n, int b, int h, int query) const {
    return data + (int64_t{b} * n.heads + h) * padded + query;
  }
};
inline constexpr int kQueryPadding = 128;  // divides `padded` for tensor-core kernels

// stats (B, H, padded, 2): SoftmaxStats.
struct BackwardProblem {
  const AttentionProblem& of;
  const Tensor &dout, &stats;
  const AttentionGradients& gradients;
};

void plain_attention(const AttentionProblem& problem, const AttentionResult& result);
void plain_attention_backward(const BackwardProblem& problem);
void tiled_attention(const AttentionProblem& problem, const AttentionResult& result);
void tiled_attention_backward(const BackwardProblem& problem);

template <class T>
struct ForwardCall {
  AttentionSizes sizes;
  HeadRows<const T> q, k, v;
  Result<T> out;
  Accumulate<T>* lse;
  Accumulate<T> scale;
  AttentionDropout dropout;
  QueryStarts starts;
};
template <class T>
struct BackwardCall {
  AttentionSizes sizes;
  HeadRows<const T> dout, q, k, v;
  SoftmaxStatsView<Accumulate<T>> stats;
  Result<T> dq, dk, dv;
  Accumulate<T> scale;
  AttentionDropout dropout;
  QueryStarts starts;
};

template <class T>
ForwardCall<T> forward_call(const AttentionProblem& p, const AttentionResult& result) {
  return {.sizes = attention_sizes(p),
          .q = count_heads<const T>(p.q),
          .k = count_heads<const T>(p.k),
          .v = count_heads<const T>(p.v),
          .out = collect_result<T>(result.out),
          .lse = result.lse.device_data<Accumulate<T>>(),
          .scale = static_cast<Accumulate<T>>(p.options.scale),
          .dropout = attention_dropout(p.options),
          .starts = query_starts(p)};
}
template <class T>
BackwardCall<T> backward_call(const BackwardProblem& p) {
  return {.sizes = attention_sizes(p.of),
          .dout = count_heads<const T>(p.dout),
          .q = count_heads<const T>(p.of.q),
          .k = count_heads<const T>(p.of.k),
          .v = count_heads<const T>(p.of.v),
          .stats = {reinterpret_cast<const SoftmaxStats<Accumulate<T>>*>(p.stats.device_data<Accumulate<T>>()),
                    static_cast<int>(p.stats.dim(2))},
          .dq = collect_result<T>(p.gradients.dq),
          .dk = collect_result<T>(p.gradients.dk),
          .dv = collect_result<T>(p.gradients.dv),
          .scale = static_cast<Accumulate<T>>(p.of.options.scale),
          .dropout = attention_dropout(p.of.options),
          .starts = query_starts(p.of)};
}

// Tile of a thread block: heads in order; within a head, tiles with the most work under a causal mask first.
struct TilePlace {
  int b, h, tile;

  static __device__ TilePlace of_queries(const AttentionSizes& s, int tiles, int at) {
    return {at / tiles / s.heads, at / tiles % s.heads, tiles - 1 - at % tiles};
  }
  static __device__ TilePlace of_keys(const AttentionSizes& s, int tiles, int at) {
    return {at / tiles / s.key_heads, at / tiles % s.key_heads, at % tiles};
  }
  __device__ TilePlace keys(const AttentionSizes& s) const { return {b, h / s.group, tile}; }
  __device__ TilePlace queries(const AttentionSizes& s, int member) const { return {b, h * s.group + member, tile}; }
};

constexpr int count_tiles(int n, int size) { return (n + size - 1) / size; }

}  // namespace tessera::cuda
