// Blockwise attention (tensor/ops/attention/attention.h), forward and backward, over blocks of queries and keys.
//
// `Tiles` packs the operands of a block and multiplies them: in float32 or float64 (attention.cpp), or in bfloat16
// pairs or AMX tiles (x86/bf16.cpp). A left operand has 64 rows; a right operand has 64 rows, or D if transposed. Tiles
// of the T x T matrix are keys x queries. Members of `Tiles`:
//
//   Stored, Element, Sum         types of tensors, of packed operands, and of accumulators
//   kScalesQueries               whether packed queries are scaled; otherwise scores and gradients of keys are
//   kPacksAllKeys                whether a task is a key-value head, whose keys and values are packed once; otherwise a
//                                task of the forward pass is a block of queries
//   kRounds, kTransposes         whether rounding a tile, and transposing one, need memory
//   Scope                        exists while a thread multiplies
//   width(), padded()            queries per block of the forward pass; a head dim with padding
//   pack_*(), left*(), round_*() packed operands
//   multiply()                   C (m x n) = or += A (m x k) B (k x n), with contiguous C
//   add_values(), scale_queries(), rows()
//                                the output of a block of queries: += weights * values, *= a factor per query, and as
//                                rows of queries
#pragma once
#include <algorithm>
#include <cstdint>
#include <limits>

#include "tensor/ops/attention/cpu/tiles.h"

namespace tessera::cpu {

// Arrays of a thread, each aligned to 64 bytes. Constructed with address 0, computes only their total size.
class TileMemory {
 public:
  explicit TileMemory(std::byte* begin) : begin_(reinterpret_cast<uintptr_t>(begin)) {}
  int64_t bytes() const { return bytes_; }
  template <class T>
  T* take(int64_t n) {
    const uintptr_t here = begin_ + static_cast<uintptr_t>(bytes_);
    bytes_ += lanes_up(n * static_cast<int64_t>(sizeof(T)), 64);
    return reinterpret_cast<T*>(here);
  }

 private:
  uintptr_t begin_;
  int64_t bytes_ = 0;
};

inline int64_t blocks_in(int64_t n, int64_t block = kBlock) { return (n + block - 1) / block; }

template <class Tiles>
class AttentionForward {
 public:
  using T = typename Tiles::Stored;
  using E = typename Tiles::Element;
  using A = typename Tiles::Sum;

  AttentionForward(TileMemory& memory, const AttentionProblem& p, const AttentionResult& result)
      : p_(p),
        result_(result),
        width_(Tiles::width(p)),
        ld_(Tiles::padded(p.d)),
        keys_(memory.take<E>((Tiles::kPacksAllKeys ? blocks_in(p.tk) : 1) * kBlock * ld_)),
        values_(memory.take<E>((Tiles::kPacksAllKeys ? blocks_in(p.tk) : 1) * kBlock * ld_)),
        query_(memory.take<E>(width_ * ld_)),
        rounded_(memory.take<E>(Tiles::kRounds ? kBlock * width_ : 0)),
        out_(memory.take<A>(width_ * ld_)),
        transposed_(memory.take<A>(Tiles::kTransposes ? width_ * ld_ : 0)),
        scores_(memory.take<A>(kBlock * width_)),
        keep_(memory.take<A>(kBlock * width_)),
        max_(memory.take<A>(width_)),
        sum_(memory.take<A>(width_)),
        shrink_(memory.take<A>(width_)) {}

  static int64_t tasks(const AttentionProblem& p) {
    return p.batch * (Tiles::kPacksAllKeys ? p.key_heads : p.heads * blocks_in(p.tq, Tiles::width(p)));
  }

  void run(int64_t task) {
    if constexpr (Tiles::kPacksAllKeys) {
      const int64_t b = task / p_.key_heads, key_head = task % p_.key_heads;
      for (int64_t key0 = 0; key0 < p_.tk; key0 += kBlock) pack_keys(b, key_head, key0);
      for (int64_t h = key_head * p_.group(); h < (key_head + 1) * p_.group(); ++h)
        for (int64_t query0 = 0; query0 < p_.tq; query0 += width_) queries(b, h, query0);
    } else {
      const int64_t blocks = blocks_in(p_.tq, width_), head = task / blocks;
      queries(head / p_.heads, head % p_.heads, task % blocks * width_);
    }
  }

 private:
  int64_t key_offset(int64_t key0) const { return Tiles::kPacksAllKeys ? key0 * ld_ : 0; }

  void pack_keys(int64_t b, int64_t key_head, int64_t key0) const {
    const int64_t count = std::min(kBlock, p_.tk - key0), at = key_offset(key0);
    Tiles::pack_left(keys_ + at, tile_rows<const T>(p_.k, b, key_head, key0), count, p_.d);
    Tiles::pack_values(values_ + at, tile_rows<const T>(p_.v, b, key_head, key0), count, p_.d);
  }

  void queries(int64_t b, int64_t h, int64_t query0) const {
    const int64_t w = width_, count = std::min(w, p_.tq - query0), visible = visible_keys(p_, query0, count);
    const int64_t first = first_block(p_, b, query0, count);
    const A scale = static_cast<A>(p_.options.scale);
    Tiles::pack_right_transposed(query_, w, tile_rows<const T>(p_.q, b, h, query0), count, p_.d,
                                 Tiles::kScalesQueries ? scale : A(1));
    std::fill(max_, max_ + w, -std::numeric_limits<A>::infinity());
    std::fill(sum_, sum_ + w, A(0));
    if (first >= visible) std::fill(out_, out_ + ld_ * w, A(0));
    for (int64_t key0 = first; key0 < visible; key0 += kBlock) {
      if constexpr (!Tiles::kPacksAllKeys) pack_keys(b, h / p_.group(), key0);
      const int64_t at = key_offset(key0);
      Tiles::multiply(kBlock, w, p_.d, Tiles::left(keys_ + at, p_.d), query_, scores_, false);
      if constexpr (!Tiles::kScalesQueries) scale_tile(scores_, scale, kBlock * w);
      mask_tile(scores_, w, mask_at(p_, b, key0, query0));
      softmax_tile(scores_, w, max_, sum_, shrink_);
      if (key0 > first) Tiles::scale_queries(out_, shrink_, w, ld_);
      if (p_.options.dropout > 0) {
        dropout_tile(keep_, w, p_, b, h, key0, query0);
        multiply_tile(scores_, scores_, keep_, kBlock * w);
      }
      const E* const weights = Tiles::round_right(rounded_, scores_, kBlock * w);
      Tiles::add_values(out_, weights, values_ + at, w, ld_, key0 > first);
    }
    A* const lse = result_.lse.template data<A>() + (b * p_.heads + h) * p_.tq + query0;
    for (int64_t i = 0; i < w; ++i) {
      if (i < count) lse[i] = max_[i] + math::log(sum_[i]);
      shrink_[i] = i < count && sum_[i] != 0 ? A(1) / sum_[i] : A(0);  // 0: no visible key
    }
    Tiles::scale_queries(out_, shrink_, w, ld_);
    store_head<T>(result_.out, {b, h, query0}, Tiles::rows(transposed_, out_, w, ld_), ld_, count);
  }

  const AttentionProblem& p_;
  const AttentionResult& result_;
  const int64_t width_, ld_;
  E *const keys_, *const values_, *const query_, *const rounded_;
  A *const out_, *const transposed_, *const scores_, *const keep_, *const max_, *const sum_, *const shrink_;
};

// A task is a key-value head.
template <class Tiles>
class AttentionBackward {
 public:
  using T = typename Tiles::Stored;
  using E = typename Tiles::Element;
  using A = typename Tiles::Sum;

  AttentionBackward(TileMemory& memory, const AttentionProblem& p, const Tensor& dout, const AttentionResult& forward,
                    const AttentionGradients& grads)
      : p_(p),
        dout_(dout),
        forward_(forward),
        grads_(grads),
        ld_(Tiles::padded(p.d)),
        padded_(blocks_in(p.tq) * kBlock),
        keys_(blocks_in(p.tk) * kBlock * ld_),
        query_t_(memory.take<E>(padded_ * ld_)),
        dout_t_(memory.take<E>(padded_ * ld_)),
        query_rows_(memory.take<E>(padded_ * ld_)),
        dout_rows_(memory.take<E>(padded_ * ld_)),
        dquery_(memory.take<A>(padded_ * ld_)),
        lse_(memory.take<A>(padded_)),
        delta_(memory.take<A>(padded_)),
        key_(memory.take<E>(kBlock * ld_)),
        value_(memory.take<E>(kBlock * ld_)),
        key_columns_(memory.take<E>(kBlock * ld_)),
        dkey_(memory.take<A>(keys_)),
        dvalue_(memory.take<A>(keys_)),
        scores_(memory.take<A>(kTile)),
        dscores_(memory.take<A>(kTile)),
        keep_(memory.take<A>(kTile)),
        rounded_(memory.take<E>(Tiles::kRounds ? kTile : 0)),
        transposed_(memory.take<E>(Tiles::kTransposes ? kTile : 0)) {}

  static int64_t tasks(const AttentionProblem& p) { return p.batch * p.key_heads; }

  void run(int64_t task) const {
    const int64_t b = task / p_.key_heads, key_head = task % p_.key_heads;
    std::fill(dkey_, dkey_ + keys_, A(0));
    std::fill(dvalue_, dvalue_ + keys_, A(0));
    for (int64_t h = key_head * p_.group(); h < (key_head + 1) * p_.group(); ++h) {
      prepare(b, h);
      for (int64_t key0 = 0; key0 < p_.tk; key0 += kBlock) {
        const int64_t count = std::min(kBlock, p_.tk - key0);
        const Rows<const T> k = tile_rows<const T>(p_.k, b, key_head, key0);
        Tiles::pack_left(key_, k, count, p_.d);
        Tiles::pack_left(value_, tile_rows<const T>(p_.v, b, key_head, key0), count, p_.d);
        Tiles::pack_right(key_columns_, k, count, p_.d, A(1));
        for (int64_t query0 = 0; query0 < p_.tq; query0 += kBlock)
          if (visible_keys(p_, query0, kBlock) > key0 && first_block(p_, b, query0, kBlock) <= key0)
            pair(b, h, key0, query0);
      }
      scale_tile(dquery_, scale_, p_.tq * ld_);
      store_head<T>(grads_.dq, {b, h, 0}, dquery_, ld_, p_.tq);
    }
    if constexpr (!Tiles::kScalesQueries) scale_tile(dkey_, scale_, p_.tk * ld_);
    store_head<T>(grads_.dk, {b, key_head, 0}, dkey_, ld_, p_.tk);
    store_head<T>(grads_.dv, {b, key_head, 0}, dvalue_, ld_, p_.tk);
  }

 private:
  static constexpr int64_t kTile = kBlock * kBlock;

  // Operands and statistics of all queries of a head.
  void prepare(int64_t b, int64_t h) const {
    const A factor = Tiles::kScalesQueries ? scale_ : A(1);
    for (int64_t i = 0; i < padded_; i += kBlock) {
      const int64_t count = std::min(kBlock, p_.tq - i), at = i * ld_;
      const Rows<const T> q = tile_rows<const T>(p_.q, b, h, i), g = tile_rows<const T>(dout_, b, h, i);
      Tiles::pack_right_transposed(query_t_ + at, kBlock, q, count, p_.d, factor);
      Tiles::pack_right_transposed(dout_t_ + at, kBlock, g, count, p_.d, A(1));
      Tiles::pack_right(query_rows_ + at, q, count, p_.d, factor);
      Tiles::pack_right(dout_rows_ + at, g, count, p_.d, A(1));
    }
    std::fill(dquery_, dquery_ + padded_ * ld_, A(0));
    const A* const lse = forward_.lse.template data<A>() + (b * p_.heads + h) * p_.tq;
    output_dots(delta_, tile_rows<const T>(dout_, b, h, 0), tile_rows<const T>(forward_.out, b, h, 0), p_.tq, p_.d);
    for (int64_t i = 0; i < padded_; ++i) {
      lse_[i] = lse_or_none(lse, i, p_.tq);
      if (i >= p_.tq) delta_[i] = 0;
    }
  }

  void pair(int64_t b, int64_t h, int64_t key0, int64_t query0) const {
    const int64_t at = query0 * ld_;
    Tiles::multiply(kBlock, kBlock, p_.d, Tiles::left(key_, p_.d), query_t_ + at, scores_, false);
    if constexpr (!Tiles::kScalesQueries) scale_tile(scores_, scale_, kTile);
    mask_tile(scores_, kBlock, mask_at(p_, b, key0, query0));
    probability_tile(scores_, kBlock, lse_ + query0);
    Tiles::multiply(kBlock, kBlock, p_.d, Tiles::left(value_, p_.d), dout_t_ + at, dscores_, false);
    if (p_.options.dropout > 0) {
      dropout_tile(keep_, kBlock, p_, b, h, key0, query0);
      multiply_tile(dscores_, dscores_, keep_, kTile);
      multiply_tile(keep_, scores_, keep_, kTile);
    }
    const E* const weights = Tiles::round_left(rounded_, p_.options.dropout > 0 ? keep_ : scores_);
    Tiles::multiply(kBlock, ld_, kBlock, Tiles::left_tile(weights), dout_rows_ + at, dvalue_ + key0 * ld_, true);
    score_gradient_tile(dscores_, scores_, kBlock, delta_ + query0);
    const E* const slopes = Tiles::round_left(rounded_, dscores_);
    Tiles::multiply(kBlock, ld_, kBlock, Tiles::left_tile(slopes), query_rows_ + at, dkey_ + key0 * ld_, true);
    Tiles::multiply(kBlock, ld_, kBlock, Tiles::left_tile_transposed(transposed_, slopes), key_columns_, dquery_ + at,
                    true);
  }

  const AttentionProblem& p_;
  const Tensor& dout_;
  const AttentionResult& forward_;
  const AttentionGradients& grads_;
  const A scale_ = static_cast<A>(p_.options.scale);
  const int64_t ld_, padded_, keys_;                                         // keys_: elements of all keys
  E *const query_t_, *const dout_t_, *const query_rows_, *const dout_rows_;  // of all queries
  A *const dquery_, *const lse_, *const delta_;
  E *const key_, *const value_, *const key_columns_;  // of a block of keys
  A *const dkey_, *const dvalue_;                     // of all keys
  A *const scores_, *const dscores_, *const keep_;
  E *const rounded_, *const transposed_;
};

// Each thread's worker processes some of the tasks.
template <template <class> class Worker, class Tiles, class... Rest>
void run_blocks(const AttentionProblem& p, const Rest&... rest) {
  const int64_t tasks = Worker<Tiles>::tasks(p);
  TileMemory measured(nullptr);
  [[maybe_unused]] const Worker<Tiles> unused(measured, p, rest...);
  const int64_t each = measured.bytes();
  const Tensor all = p.q.make({std::min<int64_t>(threads(), tasks) * each}, DType::uint8, Category::workspace);
  split(tasks, 1, [&](int64_t begin, int64_t end) {
    [[maybe_unused]] const typename Tiles::Scope scope;
    TileMemory memory(all.raw() + omp_get_thread_num() * each);
    Worker<Tiles> worker(memory, p, rest...);
    for (int64_t task = begin; task < end; ++task) worker.run(task);
  });
}

}  // namespace tessera::cpu
