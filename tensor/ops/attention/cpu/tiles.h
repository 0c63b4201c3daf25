// Steps of blockwise attention (tensor/ops/attention/attention.h) on a tile of keys x queries.
#pragma once
#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <limits>
#include <type_traits>

#include "tensor/cpu/loops.h"
#include "tensor/math.h"
#include "tensor/ops/attention/attention.h"
#include "tensor/ops/matmul/cpu/gemm.h"

namespace tessera::cpu {

inline constexpr int64_t kBlock = 64;  // keys per tile; also queries, unless there are few

template <class T>
struct Rows {
  T* data;
  int64_t stride;
};

template <class T>
Rows<T> tile_rows(const Tensor& t, int64_t b, int64_t h, int64_t row) {
  using Plain = std::remove_const_t<T>;
  return {t.data<Plain>() + b * t.strides()[0] + row * t.strides()[1] + h * t.strides()[2], t.strides()[1]};
}

// Copies rows x d values into a zero-padded tile (padded_rows x ld), scaled.
template <class A, class T>
void load_tile(A* tile, int64_t padded_rows, int64_t ld, Rows<const T> from, int64_t rows, int64_t d, A factor) {
  vectorized([=] {
    for (int64_t i = 0; i < rows; ++i) {
      const T* const in = from.data + i * from.stride;
      A* const to = tile + i * ld;
      for (int64_t c = 0; c < d; ++c) to[c] = static_cast<A>(in[c]) * factor;
      for (int64_t c = d; c < ld; ++c) to[c] = A(0);
    }
  });
  for (int64_t i = rows; i < padded_rows; ++i) std::fill(tile + i * ld, tile + (i + 1) * ld, A(0));
}

// The transpose of load_tile(): a zero-padded tile (d x width).
template <class A, class T>
void load_transposed(A* tile_t, int64_t width, Rows<const T> from, int64_t rows, int64_t d, A factor) {
  for (int64_t c0 = 0; c0 < d; c0 += 8)
    for (int64_t i = 0; i < width; ++i)
      for (int64_t c = c0; c < std::min(d, c0 + 8); ++c)
        tile_t[c * width + i] = i < rows ? static_cast<A>(from.data[i * from.stride + c]) * factor : A(0);
}

template <class A, class T>
void store_rows(Rows<T> to, const A* tile, int64_t ld, int64_t rows, int64_t d) {
  vectorized([=] {
    for (int64_t i = 0; i < rows; ++i)
      for (int64_t c = 0; c < d; ++c) to.data[i * to.stride + c] = T(tile[i * ld + c]);
  });
}

struct HeadRow {
  int64_t b, h, row;
};

// `to` has dtype T or A.
template <class T, class A>
void store_head(const Tensor& to, const HeadRow& at, const A* tile, int64_t ld, int64_t rows) {
  if (to.dtype() == kDTypeOf<A>)
    store_rows<A, A>(tile_rows<A>(to, at.b, at.h, at.row), tile, ld, rows, to.dim(3));
  else
    store_rows<A, T>(tile_rows<T>(to, at.b, at.h, at.row), tile, ld, rows, to.dim(3));
}

inline QueryStarts::Bounds start_bounds(const QueryStarts& starts, int64_t b, int64_t query0, int64_t count) {
  if (!starts.any()) return {};
  QueryStarts::Bounds found{1 << 30, 0};
  const auto first = static_cast<int>(query0),
             last = static_cast<int>(std::min<int64_t>(query0 + count, starts.queries));
  for (int query = first; query < last; ++query) {
    found.min_start = std::min(found.min_start, starts.of(b, query));
    found.max_start = std::max(found.max_start, starts.of(b, query));
  }
  return {std::max(found.min_start, 0), found.max_start};
}

// Visible: j < keys and j <= i + diagonal for key j and query i, unless j precedes the query's start.
struct TileMask {
  int64_t keys;
  int64_t diagonal;
  int64_t key0;  // position of the tile's key 0
  QueryStarts starts;
  int64_t b, query0;
  bool is_full(int64_t block) const { return keys == block && diagonal >= block - 1; }
};

template <class A>
void mask_tile(A* scores, int64_t width, const TileMask& mask) {
  constexpr A kNone = -std::numeric_limits<A>::infinity();
  if (!mask.is_full(kBlock))
    for (int64_t j = 0; j < kBlock; ++j) {
      const int64_t first = j < mask.keys ? std::clamp<int64_t>(j - mask.diagonal, 0, width) : width;
      std::fill(scores + j * width, scores + j * width + first, kNone);
    }
  if (start_bounds(mask.starts, mask.b, mask.query0, width).max_start <= mask.key0) return;
  for (int64_t i = 0; i < width; ++i) {
    const int64_t start = mask.starts.of(mask.b, static_cast<int>(mask.query0 + i));
    for (int64_t j = 0; j < std::min(kBlock, start - mask.key0); ++j) scores[j * width + i] = kNone;
  }
}

// One step of the online softmax: scores become exp(s - max); `shrink` receives the correction factors of earlier sums
// and outputs. A query without keys so far has a maximum of -infinity.
template <class A>
void softmax_tile(A* scores, int64_t width, A* max, A* sum, A* shrink) {
  vectorized([=] {
    for (int64_t i0 = 0; i0 < width; i0 += kLanes<A>) {
      A top[kLanes<A>], offset[kLanes<A>], total[kLanes<A>] = {};
      for (int64_t i = 0; i < kLanes<A>; ++i) top[i] = max[i0 + i];
      for (int64_t j = 0; j < kBlock; ++j)
        for (int64_t i = 0; i < kLanes<A>; ++i) top[i] = std::max(top[i], scores[j * width + i0 + i]);
      for (int64_t i = 0; i < kLanes<A>; ++i) offset[i] = top[i] > -std::numeric_limits<A>::infinity() ? top[i] : A(0);
      for (int64_t j = 0; j < kBlock; ++j)
        for (int64_t i = 0; i < kLanes<A>; ++i) {
          const A e = math::exp(scores[j * width + i0 + i] - offset[i]);
          scores[j * width + i0 + i] = e;
          total[i] += e;
        }
      for (int64_t i = 0; i < kLanes<A>; ++i) {
        shrink[i0 + i] = math::exp(max[i0 + i] - offset[i]);
        sum[i0 + i] = math::fma(sum[i0 + i], shrink[i0 + i], total[i]);
        max[i0 + i] = top[i];
      }
    }
  });
}

// Scores become probabilities exp(s - lse).
template <class A>
void probability_tile(A* scores, int64_t width, const A* lse) {
  vectorized([=] {
    for (int64_t j = 0; j < kBlock; ++j)
      for (int64_t i = 0; i < width; ++i) scores[j * width + i] = math::exp(scores[j * width + i] - lse[i]);
  });
}

// The log-sum-exp; infinity for padding and queries without keys, so that every probability is 0.
template <class A>
A lse_or_none(const A* lse, int64_t i, int64_t queries) {
  constexpr A kInfinity = std::numeric_limits<A>::infinity();
  return i >= queries || lse[i] == -kInfinity ? kInfinity : lse[i];
}

template <class A>
void score_gradient_tile(A* dp, const A* p, int64_t width, const A* delta) {
  vectorized([=] {
    for (int64_t j = 0; j < kBlock; ++j)
#pragma GCC ivdep
      for (int64_t i = 0; i < width; ++i) dp[j * width + i] = p[j * width + i] * (dp[j * width + i] - delta[i]);
  });
}

// The tile rounded to T, in `to` unless T is A.
template <class T, class A>
const A* round_tile([[maybe_unused]] A* to, const A* tile, [[maybe_unused]] int64_t n) {
  if constexpr (std::is_same_v<T, A>) return tile;
  vectorized([=] {
    for (int64_t i = 0; i < n; ++i) to[i] = static_cast<A>(T(tile[i]));
  });
  return to;
}

template <class A, class T>
void output_dots(A* dots, Rows<const T> a, Rows<const T> b, int64_t n, int64_t d) {
  vectorized([=] {
    for (int64_t i = 0; i < n; ++i) {
      const T *const x = a.data + i * a.stride, *const y = b.data + i * b.stride;
      dots[i] = lane_sum<A>(d, [=](int64_t c) { return static_cast<A>(x[c]) * static_cast<A>(y[c]); });
    }
  });
}

template <class A>
void multiply_tile(A* to, const A* a, const A* b, int64_t n) {
  vectorized([=] {
#pragma GCC ivdep
    for (int64_t i = 0; i < n; ++i) to[i] = a[i] * b[i];
  });
}

inline TileMask mask_at(const AttentionProblem& p, int64_t b, int64_t key0, int64_t query0) {
  return {std::min(kBlock, p.tk - key0),
          p.options.causal ? query0 + p.offset() - key0 : p.tk,
          key0,
          query_starts(p),
          b,
          query0};
}
// First key block visible to any of the queries.
inline int64_t first_block(const AttentionProblem& p, int64_t b, int64_t query0, int64_t queries) {
  return start_bounds(query_starts(p), b, query0, queries).min_start / kBlock * kBlock;
}
inline int64_t visible_keys(const AttentionProblem& p, int64_t query0, int64_t queries) {
  return p.options.causal ? std::min(p.tk, query0 + queries + p.offset()) : p.tk;
}

template <class A>
void dropout_tile(A* keep, int64_t width, const AttentionProblem& p, int64_t b, int64_t h, int64_t key0,
                  int64_t query0) {
  const AttentionDropout dropout = attention_dropout(p.options);
  const A up = static_cast<A>(dropout.up);
  const float probability = dropout.probability;
  vectorized([&] {
    for (int64_t i = 0; i < width; ++i) {
      const uint64_t row = dropout.index(b, h, query0 + i) + static_cast<uint64_t>(key0);
      float uniform[kBlock];
      dropout.random.uniforms<kBlock>(row, dropout.step, uniform);
      for (int64_t j = 0; j < kBlock; ++j) keep[j * width + i] = uniform[j] >= probability ? up : A(0);
    }
  });
}

inline int64_t lanes_up(int64_t n, int64_t lanes) { return (n + lanes - 1) / lanes * lanes; }

template <class A>
void scale_tile(A* x, A by, int64_t n) {
  vectorized([=] {
    for (int64_t i = 0; i < n; ++i) x[i] *= by;
  });
}

// bfloat16 attention on AMX tiles or AVX512_BF16 pair products, with each 64 x 64 matmul as four blocks. Scores and
// sums are float32; probabilities and their gradients are rounded as matmul inputs, as in the other kernels.

// Requires such a CPU and enough queries to fill a block.
bool supports_bf16_attention(const AttentionProblem& p);

void bf16_attention(const AttentionProblem& p, const AttentionResult& result);
void bf16_attention_backward(const AttentionProblem& p, const Tensor& dout, const AttentionResult& forward,
                             const AttentionGradients& gradients);
#ifndef __x86_64__
inline bool supports_bf16_attention(const AttentionProblem& /*p*/) { return false; }
inline void bf16_attention(const AttentionProblem&, const AttentionResult&) { std::abort(); }
inline void bf16_attention_backward(const AttentionProblem&, const Tensor&, const AttentionResult&,
                                    const AttentionGradients&) {
  std::abort();
}
#endif

}  // namespace tessera::cpu
