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

// tile_t (d x width) = tile (width x ld) transposed.
template <class A>
void transpose_tile(A* tile_t, const A* tile, int64_t width, int64_t ld, int64_t d) {
  for (int64_t c0 = 0; c0 < d; c0 += 8)
    for (int64_t i = 0; i < width; ++i)
      for (int64_t c = c0; c < std::min(d, c0 + 8); ++c) tile_t[c * width + i] = tile[i * ld + c];
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

// First visible key of each query, relative to the problem's key 0: the later of first[i] - offset (documents) and
// begin + i (window).
struct QueryStarts {
  static constexpr int64_t kNone = std::numeric_limits<int64_t>::min() / 2;
  const int32_t* first = nullptr;  // null: no documents
  int64_t offset = 0, queries = 0, begin = kNone;
  bool any() const { return first || begin != kNone; }
  int64_t of(int64_t i) const { return std::max(first ? first[i] - offset : kNone, begin + i); }
  int64_t min_start() const {
    int64_t found = any() ? of(0) : 0;
    for (int64_t i = 1; any() && i < queries; ++i) found = std::min(found, of(i));
    return found;
  }
  int64_t max_start() const {
    int64_t found = any() ? of(0) : 0;
    for (int64_t i = 1; any() && i < queries; ++i) found = std::max(found, of(i));
    return found;
  }
};
inline QueryStarts starts_at(const AttentionProblem& p, int64_t b, int64_t query0, int64_t queries) {
  const AttentionOptions& o = p.options;
  QueryStarts out{.offset = o.first_key, .queries = std::min(queries, p.tq - query0)};
  if (o.starts.defined()) out.first = o.starts.data<int32_t>() + b * o.starts.strides()[0] + query0;
  if (o.window > 0) out.begin = o.first_query - o.first_key + query0 - o.window + 1;
  return out;
}

// Visible: j < keys and j <= i + diagonal for key j and query i, unless j precedes the query's start.
struct TileMask {
  int64_t keys;
  int64_t diagonal;
  int64_t key0;  // position of the tile's key 0
  QueryStarts starts;
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
  if (mask.starts.max_start() <= mask.key0) return;
  for (int64_t i = 0; i < mask.starts.queries; ++i)
    for (int64_t j = 0; j < std::min(kBlock, mask.starts.of(i) - mask.key0); ++j) scores[j * width + i] = kNone;
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

template <class T, class A>
void round_tile(A* tile, int64_t n) {
  if constexpr (!std::is_same_v<T, A>)
    vectorized([=] {
      for (int64_t i = 0; i < n; ++i) tile[i] = static_cast<A>(T(tile[i]));
    });
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
  return {std::min(kBlock, p.tk - key0), p.options.causal ? query0 + p.offset() - key0 : p.tk, key0,
          starts_at(p, b, query0, kBlock)};
}
inline int64_t first_block(const QueryStarts& starts) {
  return std::max<int64_t>(starts.min_start(), 0) / kBlock * kBlock;
}
inline int64_t visible_keys(const AttentionProblem& p, int64_t query0, int64_t queries) {
  return p.options.causal ? std::min(p.tk, query0 + queries + p.offset()) : p.tk;
}

template <class A>
void dropout_tile(A* keep, int64_t width, const AttentionProblem& p, int64_t b, int64_t h, int64_t key0,
                  int64_t query0) {
  const AttentionOptions& o = p.options;
  const auto t = static_cast<uint64_t>(o.tokens_total);
  const uint64_t plane = static_cast<uint64_t>((o.first_sequence + b) * o.heads_total + o.first_head + h) * t * t;
  const auto probability = static_cast<float>(o.dropout);
  const A up = static_cast<A>(1 / (1 - o.dropout));
  vectorized([&] {
    for (int64_t i = 0; i < width; ++i) {
      const uint64_t row =
          plane + static_cast<uint64_t>(o.first_query + query0 + i) * t + static_cast<uint64_t>(o.first_key + key0);
      float uniform[kBlock];
      o.random.uniforms<kBlock>(row, o.step, uniform);
      for (int64_t j = 0; j < kBlock; ++j) keep[j * width + i] = uniform[j] >= probability ? up : A(0);
    }
  });
}

inline int64_t lanes_up(int64_t n, int64_t lanes) { return (n + lanes - 1) / lanes * lanes; }

template <class A>
struct Buffer {
  explicit Buffer(const Tensor& owner, int64_t elements)
      : tensor(owner.make({elements}, kDTypeOf<A>, Category::workspace)), at(tensor.data<A>()) {}
  A* take(int64_t n) {
    A* const p = at;
    at += (n + kLanes<A> - 1) / kLanes<A> * kLanes<A>;
    return p;
  }
  Tensor tensor;
  A* at;
};

template <class A>
class Buffers {
 public:
  Buffers(const Tensor& owner, int64_t tasks, int64_t elements)
      : each_(lanes_up(elements, kLanes<A>)), all_(owner, std::min<int64_t>(threads(), tasks) * each_) {}
  Buffer<A> of_this_thread() const {
    Buffer<A> own = all_;
    own.at += omp_get_thread_num() * each_;
    return own;
  }

 private:
  int64_t each_;
  Buffer<A> all_;
};

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
