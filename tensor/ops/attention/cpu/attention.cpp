// Blockwise attention; x86/bf16.cpp handles bfloat16 on CPUs with AVX512_BF16 or AMX.

#include <algorithm>
#include <cstdint>
#include <limits>
#include <type_traits>

#include "tensor/ops/attention/cpu/tiles.h"

namespace tessera::cpu {
namespace {

template <class T>
class Forward {
 public:
  using A = Accumulate<T>;
  Forward(const AttentionProblem& problem, const AttentionResult& result)
      : p_(problem), result_(result), width_(p_.tq <= kLanes<A> ? kLanes<A> : kBlock), ld_(lanes_up(p_.d, kLanes<A>)) {}

  void run() const {
    const int64_t blocks = (p_.tq + width_ - 1) / width_, tasks = p_.batch * p_.heads * blocks;
    const int64_t size = width_ * (3 * ld_ + 2 * kBlock + 3) + 2 * kBlock * ld_ + 16 * kLanes<A>;
    const Buffers<A> memory(p_.q, tasks, size);
    split(tasks, 1, [&](int64_t begin, int64_t end) {
      for (int64_t task = begin; task < end; ++task) {
        Buffer<A> fresh = memory.of_this_thread();
        block(fresh, task / blocks / p_.heads, task / blocks % p_.heads, task % blocks * width_);
      }
    });
  }

 private:
  void block(Buffer<A>& m, int64_t b, int64_t h, int64_t query0) const {
    const int64_t w = width_, queries = std::min(w, p_.tq - query0);
    A *const query = m.take(w * ld_), *const query_t = m.take(w * ld_), *const out = m.take(w * ld_);
    A *const key = m.take(kBlock * ld_), *const value = m.take(kBlock * ld_), *const scores = m.take(kBlock * w);
    A *const keep = m.take(kBlock * w), *const max = m.take(w), *const sum = m.take(w), *const shrink = m.take(w);
    load_tile<A, T>(query, w, ld_, tile_rows<const T>(p_.q, b, h, query0), queries, p_.d,
                    static_cast<A>(p_.options.scale));
    transpose_tile(query_t, query, w, ld_, p_.d);
    std::fill(max, max + w, -std::numeric_limits<A>::infinity());
    std::fill(sum, sum + w, A(0));
    std::fill(out, out + w * ld_, A(0));
    const int64_t visible = visible_keys(p_, query0, queries), key_head = h / p_.group();
    for (int64_t key0 = first_block(starts_at(p_, b, query0, queries)); key0 < visible; key0 += kBlock) {
      const int64_t keys = std::min(kBlock, p_.tk - key0);
      load_tile<A, T>(key, kBlock, ld_, tile_rows<const T>(p_.k, b, key_head, key0), keys, p_.d, A(1));
      load_tile<A, T>(value, kBlock, ld_, tile_rows<const T>(p_.v, b, key_head, key0), keys, p_.d, A(1));
      tile_gemm<A>(kBlock, w, p_.d, {key, ld_, 1}, query_t, w, scores, w, false);
      mask_tile(scores, w, mask_at(p_, b, key0, query0));
      softmax_tile(scores, w, max, sum, shrink);
      if (key0 > 0)
        for (int64_t i = 0; i < w; ++i)
          for (int64_t c = 0; c < ld_; ++c) out[i * ld_ + c] *= shrink[i];
      if (p_.options.dropout > 0) {
        dropout_tile(keep, w, p_, b, h, key0, query0);
        multiply_tile(scores, scores, keep, kBlock * w);
      }
      round_tile<T>(scores, kBlock * w);
      tile_gemm<A>(w, ld_, kBlock, {scores, 1, w}, value, ld_, out, ld_, true);
    }
    A* const lse = result_.lse.template data<A>() + (b * p_.heads + h) * p_.tq + query0;
    for (int64_t i = 0; i < queries; ++i) {
      const A inverse = sum[i] == 0 ? A(0) : A(1) / sum[i];  // 0: no visible key
      for (int64_t c = 0; c < ld_; ++c) out[i * ld_ + c] *= inverse;
      lse[i] = max[i] + math::log(sum[i]);
    }
    store_head<T>(result_.out, {b, h, query0}, out, ld_, queries);
  }

  const AttentionProblem& p_;
  const AttentionResult& result_;
  const int64_t width_, ld_;
};

template <class T>
class Backward {
 public:
  using A = Accumulate<T>;
  Backward(const AttentionProblem& problem, const Tensor& dout, const AttentionResult& forward,
           const AttentionGradients& grads)
      : p_(problem),
        dout_(dout),
        forward_(forward),
        grads_(grads),
        ld_(lanes_up(p_.d, kLanes<A>)),
        padded_(lanes_up(p_.tq, kBlock)),
        padded_keys_(lanes_up(p_.tk, kBlock)) {}

  void run() const {
    const int64_t size =
        (5 * padded_ + 2 * padded_keys_ + 2 * kBlock) * ld_ + 2 * padded_ + 4 * kBlock * kBlock + 32 * kLanes<A>;
    const Buffers<A> memory(p_.q, p_.batch * p_.key_heads, size);
    split(p_.batch * p_.key_heads, 1, [&](int64_t begin, int64_t end) {
      for (int64_t task = begin; task < end; ++task) {
        Buffer<A> fresh = memory.of_this_thread();
        group(fresh, task / p_.key_heads, task % p_.key_heads);
      }
    });
  }

 private:
  // Operands shared by all key blocks of one (b, h): queries and output gradients in both layouts, and two statistics
  // per query.
  struct Shared {
    A *query, *query_t, *dout, *dout_t, *dquery, *lse, *delta;
  };

  // Processes the query heads that share one key-value head.
  void group(Buffer<A>& m, int64_t b, int64_t key_head) const {
    const int64_t n = padded_ * ld_, keys = padded_keys_ * ld_;
    const Shared s{m.take(n), m.take(n), m.take(n), m.take(n), m.take(n), m.take(padded_), m.take(padded_)};
    A *const key = m.take(kBlock * ld_), *const value = m.take(kBlock * ld_);
    A *const dkey = m.take(keys), *const dvalue = m.take(keys), *const tiles = m.take(4 * kBlock * kBlock);
    std::fill(dkey, dkey + keys, A(0));
    std::fill(dvalue, dvalue + keys, A(0));
    for (int64_t h = key_head * p_.group(); h < (key_head + 1) * p_.group(); ++h) {
      prepare(s, b, h);
      for (int64_t key0 = 0; key0 < p_.tk; key0 += kBlock) {
        const int64_t count = std::min(kBlock, p_.tk - key0), at = key0 * ld_;
        load_tile<A, T>(key, kBlock, ld_, tile_rows<const T>(p_.k, b, key_head, key0), count, p_.d, A(1));
        load_tile<A, T>(value, kBlock, ld_, tile_rows<const T>(p_.v, b, key_head, key0), count, p_.d, A(1));
        for (int64_t query0 = 0; query0 < p_.tq; query0 += kBlock)
          if (visible_keys(p_, query0, kBlock) > key0 && first_block(starts_at(p_, b, query0, kBlock)) <= key0)
            pair(s, key, value, dkey + at, dvalue + at, tiles, {b, h, key0, query0});
      }
      load_tile<A, A>(s.dquery, p_.tq, ld_, {s.dquery, ld_}, p_.tq, ld_, static_cast<A>(p_.options.scale));
      store_head<T>(grads_.dq, {b, h, 0}, s.dquery, ld_, p_.tq);
    }
    store_head<T>(grads_.dk, {b, key_head, 0}, dkey, ld_, p_.tk);
    store_head<T>(grads_.dv, {b, key_head, 0}, dvalue, ld_, p_.tk);
  }

  void prepare(const Shared& s, int64_t b, int64_t h) const {
    load_tile<A, T>(s.query, padded_, ld_, tile_rows<const T>(p_.q, b, h, 0), p_.tq, p_.d,
                    static_cast<A>(p_.options.scale));
    load_tile<A, T>(s.dout, padded_, ld_, tile_rows<const T>(dout_, b, h, 0), p_.tq, p_.d, A(1));
    std::fill(s.dquery, s.dquery + padded_ * ld_, A(0));
    for (int64_t i = 0; i < padded_; i += kBlock) {
      transpose_tile(s.query_t + i * ld_, s.query + i * ld_, kBlock, ld_, p_.d);
      transpose_tile(s.dout_t + i * ld_, s.dout + i * ld_, kBlock, ld_, p_.d);
    }
    const A* const lse = forward_.lse.template data<A>() + (b * p_.heads + h) * p_.tq;
    output_dots(s.delta, tile_rows<const T>(dout_, b, h, 0), tile_rows<const T>(forward_.out, b, h, 0), p_.tq, p_.d);
    for (int64_t i = 0; i < padded_; ++i) {
      s.lse[i] = lse_or_none(lse, i, p_.tq);
      if (i >= p_.tq) s.delta[i] = 0;
    }
  }

  struct At {
    int64_t b, h, key0, query0;
  };

  void pair(const Shared& s, const A* key, const A* value, A* dkey, A* dvalue, A* tiles, const At& at) const {
    constexpr int64_t n = kBlock * kBlock;
    A *const p = tiles, *const dp = tiles + n, *const keep = tiles + 2 * n, *const dropped = tiles + 3 * n;
    const int64_t from = at.query0 * ld_;
    tile_gemm<A>(kBlock, kBlock, p_.d, {key, ld_, 1}, s.query_t + from, kBlock, p, kBlock, false);
    mask_tile(p, kBlock, mask_at(p_, at.b, at.key0, at.query0));
    probability_tile(p, kBlock, s.lse + at.query0);
    tile_gemm<A>(kBlock, kBlock, p_.d, {value, ld_, 1}, s.dout_t + from, kBlock, dp, kBlock, false);
    const A* weight = p;
    if (p_.options.dropout > 0) {
      dropout_tile(keep, kBlock, p_, at.b, at.h, at.key0, at.query0);
      multiply_tile(dp, dp, keep, n);
      multiply_tile(dropped, p, keep, n);
      weight = dropped;
    }
    if constexpr (!std::is_same_v<T, A>) {
      if (weight == p) std::copy(p, p + n, dropped);
      round_tile<T>(dropped, n);
      weight = dropped;
    }
    tile_gemm<A>(kBlock, ld_, kBlock, {weight, kBlock, 1}, s.dout + from, ld_, dvalue, ld_, true);
    score_gradient_tile(dp, p, kBlock, s.delta + at.query0);
    round_tile<T>(dp, n);
    tile_gemm<A>(kBlock, ld_, kBlock, {dp, kBlock, 1}, s.query + from, ld_, dkey, ld_, true);
    tile_gemm<A>(kBlock, ld_, kBlock, {dp, 1, kBlock}, key, ld_, s.dquery + from, ld_, true);
  }

  const AttentionProblem& p_;
  const Tensor& dout_;
  const AttentionResult& forward_;
  const AttentionGradients& grads_;
  const int64_t ld_, padded_, padded_keys_;
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
  with_floating(p.q.dtype(), "attention", [&](auto t) { Forward<decltype(t)>(p, result).run(); });
}

void attention_backward(const AttentionProblem& p, const Tensor& dout, const AttentionResult& forward,
                        const AttentionGradients& gradients) {
  if (supports_bf16_attention(p)) return bf16_attention_backward(p, dout, forward, gradients);
  with_floating(p.q.dtype(), "attention_backward",
                [&](auto t) { Backward<decltype(t)>(p, dout, forward, gradients).run(); });
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
