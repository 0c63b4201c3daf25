// Attention in float32 or float64, and merging. x86/bf16.cpp handles bfloat16 on CPUs with AVX512_BF16 or AMX.

#include <algorithm>
#include <cstdint>
#include <limits>
#include <type_traits>

#include "tensor/ops/attention/cpu/blocks.h"

namespace tessera::cpu {
namespace {

// Operands are row-major tiles of the accumulation type; a transpose only swaps strides.
template <class T>
struct FloatTiles {
  using Stored = T;
  using Sum = Accumulate<T>;
  using Element = Sum;
  using A = Sum;
  struct Scope {};
  static constexpr bool kScalesQueries = true, kPacksAllKeys = false, kTransposes = false;
  static constexpr bool kRounds = !std::is_same_v<T, A>;
  static int64_t width(const AttentionProblem& p) { return p.tq <= kLanes<A> ? kLanes<A> : kBlock; }
  static int64_t padded(int64_t d) { return lanes_up(d, kLanes<A>); }

  static void pack_right(A* to, Rows<const T> from, int64_t count, int64_t d, A factor) {
    load_tile<A, T>(to, kBlock, padded(d), from, count, d, factor);
  }
  static void pack_right_transposed(A* to, int64_t width, Rows<const T> from, int64_t count, int64_t d, A factor) {
    load_transposed<A, T>(to, width, from, count, d, factor);
  }
  static void pack_left(A* to, Rows<const T> from, int64_t count, int64_t d) { pack_right(to, from, count, d, A(1)); }
  static void pack_values(A* to, Rows<const T> from, int64_t count, int64_t d) { pack_right(to, from, count, d, A(1)); }
  static Strided<A> left(const A* packed, int64_t d) { return {packed, padded(d), 1}; }
  static const A* round_right(A* to, const A* tile, int64_t n) { return round_tile<T>(to, tile, n); }
  static const A* round_left(A* to, const A* tile) { return round_tile<T>(to, tile, kBlock * kBlock); }
  static Strided<A> left_tile(const A* tile) { return {tile, kBlock, 1}; }
  static Strided<A> left_tile_transposed(A* /*memory*/, const A* tile) { return {tile, 1, kBlock}; }
  static void multiply(int64_t m, int64_t n, int64_t k, Strided<A> a, const A* b, A* c, bool accumulate) {
    tile_gemm<A>(m, n, k, a, b, n, c, n, accumulate);
  }

  // The output is queries x D.
  static void add_values(A* out, const A* weights, const A* values, int64_t width, int64_t ld, bool accumulate) {
    multiply(width, ld, kBlock, {weights, 1, width}, values, out, accumulate);
  }
  static void scale_queries(A* out, const A* by, int64_t width, int64_t ld) {
    vectorized([=] {
      for (int64_t i = 0; i < width; ++i)
        for (int64_t c = 0; c < ld; ++c) out[i * ld + c] *= by[i];
    });
  }
  static const A* rows(A* /*memory*/, const A* out, int64_t /*width*/, int64_t /*ld*/) { return out; }
};

// Merges outputs of types I and P, computing in A.
template <class A, class I, class P>
void merge_rows(const AttentionResult& into, const AttentionResult& tile) {
  const int64_t heads = into.out.dim(2), tokens = into.out.dim(1), d = into.out.dim(3);
  split(into.out.dim(0) * heads, 1, [&](int64_t begin, int64_t end) {
    for (int64_t at = begin; at < end; ++at) {
      const Rows<I> to = tile_rows<I>(into.out, at / heads, at % heads, 0);
      const Rows<const P> from = tile_rows<const P>(tile.out, at / heads, at % heads, 0);
      A* const lse = into.lse.data<A>() + at / heads * into.lse.strides()[0] + at % heads * into.lse.strides()[1];
      const A* const other = tile.lse.data<A>() + at * tokens;
      for (int64_t i = 0; i < tokens; ++i) {
        const A top = std::max(lse[i], other[i]);
        if (top == -std::numeric_limits<A>::infinity()) continue;  // no visible key yet: zeros
        const A both = top + math::log(math::exp(lse[i] - top) + math::exp(other[i] - top));
        const A mine = math::exp(lse[i] - both), theirs = math::exp(other[i] - both);
        vectorized([=, y = to.data + i * to.stride, x = from.data + i * from.stride] {
          for (int64_t c = 0; c < d; ++c)
            y[c] = I(math::fma(static_cast<A>(x[c]), theirs, static_cast<A>(y[c]) * mine));
        });
        lse[i] = both;
      }
    }
  });
}

}  // namespace

void attention(const AttentionProblem& p, const AttentionResult& result) {
  if (supports_bf16_attention(p)) return bf16_attention(p, result);
  with_floating(p.q.dtype(), "attention",
                [&](auto t) { run_blocks<AttentionForward, FloatTiles<decltype(t)>>(p, result); });
}

void attention_backward(const AttentionProblem& p, const Tensor& dout, const AttentionResult& forward,
                        const AttentionGradients& gradients) {
  if (supports_bf16_attention(p)) return bf16_attention_backward(p, dout, forward, gradients);
  with_floating(p.q.dtype(), "attention_backward",
                [&](auto t) { run_blocks<AttentionBackward, FloatTiles<decltype(t)>>(p, dout, forward, gradients); });
}

void merge_attention(const AttentionResult& into, const AttentionResult& tile) {
  with_floating(into.out.dtype(), "merge_attention", [&](auto i) {
    with_floating(tile.out.dtype(), "merge_attention", [&](auto p) {
      using A = Accumulate<decltype(i)>;
      if constexpr (std::is_same_v<A, Accumulate<decltype(p)>>) merge_rows<A, decltype(i), decltype(p)>(into, tile);
    });
  });
}

}  // namespace tessera::cpu
