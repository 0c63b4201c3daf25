// Matmuls of 64 x 64 tiles.
//
// A left operand of 64 rows (A) is packed as blocks of 32 rows, a right operand of 64 columns (B) as panels of 32
// columns; for every 32 inner elements, each has two tiles, 1024 elements in total.

#include <algorithm>
#include <array>
#include <cstdint>
#include <limits>

#include "tensor/cpu/x86/amx.h"
#include "tensor/ops/attention/cpu/tiles.h"

namespace tessera::cpu {

inline constexpr int64_t kPair = 2 * kTileElements;
inline constexpr int64_t kHalves = kBlock / kTileBlock;  // blocks of 32 in a tile of 64

inline Bf16View rows_run_on(Rows<const bfloat16> r) { return {r.data, r.stride, 1}; }
inline Bf16View columns_run_on(Rows<const bfloat16> r) { return {r.data, 1, r.stride}; }

// Zero-padded blocks of 32 rows.
inline void pack_rows(bfloat16* to, Bf16View a, int64_t blocks, int64_t deep, int64_t rows, int64_t depth) {
  for (int64_t i = 0; i < blocks; ++i)
    for (int64_t d = 0; d < deep; ++d, to += kPair)
      pack_a_block(to, a.at(i * kTileBlock, d * kTileDepth), rows - i * kTileBlock, depth - d * kTileDepth);
}
// Zero-padded panels of 32 columns.
inline void pack_columns(bfloat16* to, Bf16View b, int64_t panels, int64_t deep, int64_t depth, int64_t cols) {
  for (int64_t j = 0; j < panels; ++j)
    for (int64_t d = 0; d < deep; ++d, to += kPair)
      pack_b_block(to, b.at(d * kTileDepth, j * kTileBlock), depth - d * kTileDepth, cols - j * kTileBlock);
}

struct ByTiles {
  using Scope = TileScope;
  struct NoOverlap {
    [[gnu::always_inline]] void operator()(int64_t) const {}
  };
  [[gnu::target("amx-tile,amx-bf16,avx512f,avx512bw,avx512vl,avx512bf16")]] static void block(
      TileOperandA a, const bfloat16* b, int64_t deep, float* c, int64_t ldc, bool accumulate) {
    tile_block(a, b, deep, c, ldc, accumulate, NoOverlap{});
  }
};
struct ByPairs {
  struct Scope {};
  static void block(TileOperandA a, const bfloat16* b, int64_t deep, float* c, int64_t ldc, bool accumulate) {
    pair_block(a, b, deep, c, ldc, accumulate);
  }
};

// C (32 blocks x 32 panels) = or += A B; `a_block` is the stride between A's row blocks.
template <class By>
void tile_matmul(TileOperandA a, int64_t a_block, int64_t blocks, const bfloat16* b, int64_t panels, int64_t deep,
                 float* c, int64_t ldc, bool accumulate) {
  for (int64_t i = 0; i < blocks; ++i)
    for (int64_t j = 0; j < panels; ++j)
      By::block({a.data + i * a_block, a.lda, a.step, a.down}, b + j * deep * kPair, deep,
                c + i * kTileBlock * ldc + j * kTileBlock, ldc, accumulate);
}
inline TileOperandA packed_rows(const bfloat16* a) { return {a, kTileDepth, kPair, kTileElements}; }
inline TileOperandA plain_rows(const bfloat16* a) { return {a, kBlock, kTileDepth, kTileRows * kBlock}; }

// Rounds 64 x 64 float32 values to bfloat16, row by row.
[[gnu::target("avx512f,avx512bf16")]] inline void round_rows(bfloat16* to, const float* from) {
  for (int64_t i = 0; i < kBlock * kBlock; i += 32)
    _mm512_store_si512(to + i, reinterpret_cast<__m512i>(
                                   _mm512_cvtne2ps_pbh(_mm512_load_ps(from + i + 16), _mm512_load_ps(from + i))));
}

// Rounds 64 x 64 values to a packed B with inner dim 64 (the rows) and 64 columns.
[[gnu::target("avx512f,avx512bw,avx512bf16")]] inline void round_columns(bfloat16* to, const float* from) {
  alignas(64) static constexpr auto kInterleaved = [] {
    std::array<uint16_t, 32> order{};
    for (size_t i = 0; i < 32; ++i) order[i] = static_cast<uint16_t>(i / 2 + i % 2 * 16);
    return order;
  }();
  const __m512i order = _mm512_load_si512(kInterleaved.data());
  for (int64_t panel = 0; panel < kHalves; ++panel)
    for (int64_t row = 0; row < kBlock; row += 2)
      for (int64_t half = 0; half < 2; ++half) {
        const float* const at = from + row * kBlock + panel * kTileBlock + half * kTileRows;
        const auto both =
            reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(_mm512_load_ps(at + kBlock), _mm512_load_ps(at)));
        _mm512_store_si512(to + (panel * kHalves + row / 32) * kPair + half * kTileElements + row % 32 * 16,
                           _mm512_permutexvar_epi16(order, both));
      }
}

// `rows` and `cols` are multiples of 16.
[[gnu::target("avx512f")]] inline void transpose_floats(float* to, const float* from, int64_t rows, int64_t cols) {
  for (int64_t i = 0; i < rows; i += 16)
    for (int64_t j = 0; j < cols; j += 16) {
      __m512i r[16];
      for (int64_t k = 0; k < 16; ++k) r[k] = _mm512_load_si512(from + (i + k) * cols + j);
      transpose_pairs(r);
      for (int64_t k = 0; k < 16; ++k) _mm512_store_si512(to + (j + k) * rows + i, r[k]);
    }
}

template <class Scalar>
inline void scale_tile(Scalar* x, Scalar by, int64_t n) {
  vectorized([=] {
    for (int64_t i = 0; i < n; ++i) x[i] *= by;
  });
}

// A key-value head's keys and values are packed once and used by every block of queries of the heads that share it.

namespace {

constexpr int64_t kTile = kBlock * kBlock;
constexpr int64_t kAlignment = 512;  // in floats: maximum padding that aligns each array to 64 bytes

int64_t blocks_in(int64_t n) { return (n + kBlock - 1) / kBlock; }
int64_t count_depth_tiles(int64_t d) { return (d + kTileDepth - 1) / kTileDepth; }

class Memory {
 public:
  explicit Memory(float* at) : at_(reinterpret_cast<std::byte*>((reinterpret_cast<uintptr_t>(at) + 63) / 64 * 64)) {}
  template <class T>
  T* take(int64_t n) {
    T* const here = reinterpret_cast<T*>(at_);
    at_ += (n * static_cast<int64_t>(sizeof(T)) + 63) / 64 * 64;
    return here;
  }

 private:
  std::byte* at_;
};

template <class By>
class PairedForward {
 public:
  static int64_t floats(const AttentionProblem& p) {
    const int64_t dp = count_depth_tiles(p.d) * kTileDepth;
    return blocks_in(p.tk) * kBlock * dp + kBlock * dp * 3 + 3 * kTile + 3 * kBlock;
  }
  PairedForward(Memory memory, const AttentionProblem& p, const AttentionResult& result)
      : p_(p),
        result_(result),
        deep_(count_depth_tiles(p.d)),
        dp_(deep_ * kTileDepth),
        key_blocks_(blocks_in(p.tk)),
        keys_(memory.take<bfloat16>(key_blocks_ * kBlock * dp_)),
        values_(memory.take<bfloat16>(key_blocks_ * kBlock * dp_)),
        query_(memory.take<bfloat16>(kBlock * dp_)),
        rounded_(memory.take<bfloat16>(kTile)),
        out_(memory.take<float>(kBlock * dp_)),
        transposed_(memory.take<float>(kBlock * dp_)),
        scores_(memory.take<float>(kTile)),
        mask_(memory.take<float>(kTile)),
        max_(memory.take<float>(kBlock)),
        sum_(memory.take<float>(kBlock)),
        shrink_(memory.take<float>(kBlock)) {}

  void group(int64_t b, int64_t key_head) {
    for (int64_t i = 0; i < key_blocks_; ++i) {
      const int64_t left = p_.tk - i * kBlock;
      const Rows<const bfloat16> k = tile_rows<const bfloat16>(p_.k, b, key_head, i * kBlock),
                                 v = tile_rows<const bfloat16>(p_.v, b, key_head, i * kBlock);
      pack_rows(key(i), rows_run_on(k), kHalves, deep_, left, p_.d);
      pack_rows(value(i), columns_run_on(v), deep_, kHalves, p_.d, left);
    }
    for (int64_t h = key_head * p_.group(); h < (key_head + 1) * p_.group(); ++h)
      for (int64_t query0 = 0; query0 < p_.tq; query0 += kBlock) queries(b, h, query0);
  }

 private:
  bfloat16* key(int64_t i) const { return keys_ + i * kBlock * dp_; }
  bfloat16* value(int64_t i) const { return values_ + i * kBlock * dp_; }  // transposed: d rows of keys

  void queries(int64_t b, int64_t h, int64_t query0) {
    const int64_t count = std::min(kBlock, p_.tq - query0), visible = visible_keys(p_, query0, count);
    const int64_t first = first_block(starts_at(p_, b, query0, count));
    pack_columns(query_, columns_run_on(tile_rows<const bfloat16>(p_.q, b, h, query0)), kHalves, deep_, p_.d, count);
    std::fill(max_, max_ + kBlock, -std::numeric_limits<float>::infinity());
    std::fill(sum_, sum_ + kBlock, 0.0f);
    if (first >= visible) std::fill(out_, out_ + kBlock * dp_, 0.0f);
    for (int64_t key0 = first; key0 < visible; key0 += kBlock) {
      tile_matmul<By>(packed_rows(key(key0 / kBlock)), deep_ * kPair, kHalves, query_, kHalves, deep_, scores_, kBlock,
                      false);
      scale_tile(scores_, static_cast<float>(p_.options.scale), kTile);
      mask_tile(scores_, kBlock, mask_at(p_, b, key0, query0));
      softmax_tile(scores_, kBlock, max_, sum_, shrink_);
      if (key0 > first) scale_columns(shrink_);
      if (p_.options.dropout > 0) {
        dropout_tile(mask_, kBlock, p_, b, h, key0, query0);
        multiply_tile(scores_, scores_, mask_, kTile);
      }
      round_columns(rounded_, scores_);
      tile_matmul<By>(packed_rows(value(key0 / kBlock)), kHalves * kPair, deep_, rounded_, kHalves, kHalves, out_,
                      kBlock, key0 > first);
    }
    float* const lse = result_.lse.data<float>() + (b * p_.heads + h) * p_.tq + query0;
    for (int64_t i = 0; i < kBlock; ++i) {
      if (i < count) lse[i] = max_[i] + math::log(sum_[i]);
      shrink_[i] = i < count && sum_[i] != 0 ? 1.0f / sum_[i] : 0.0f;  // 0: no visible key
    }
    scale_columns(shrink_);
    transpose_floats(transposed_, out_, dp_, kBlock);
    store_head<bfloat16>(result_.out, {b, h, query0}, transposed_, dp_, count);
  }

  // Multiplies each query's column of the output (d x queries) by its factor.
  void scale_columns(const float* by) const {
    vectorized([out = out_, by, n = dp_] {
      for (int64_t c = 0; c < n; ++c)
        for (int64_t i = 0; i < kBlock; ++i) out[c * kBlock + i] *= by[i];
    });
  }

  const AttentionProblem& p_;
  const AttentionResult& result_;
  const int64_t deep_, dp_, key_blocks_;
  bfloat16 *const keys_, *const values_, *const query_, *const rounded_;
  float *const out_, *const transposed_, *const scores_, *const mask_, *const max_, *const sum_, *const shrink_;
};

template <class By>
class PairedBackward {
 public:
  static int64_t floats(const AttentionProblem& p) {
    const int64_t dp = count_depth_tiles(p.d) * kTileDepth, queries = blocks_in(p.tq) * kBlock,
                  keys = blocks_in(p.tk) * kBlock;
    return 3 * queries * dp + 2 * queries + 2 * keys * dp + 2 * kBlock * dp + 5 * kTile;
  }
  PairedBackward(Memory memory, const AttentionProblem& p, const Tensor& dout, const AttentionResult& forward,
                 const AttentionGradients& grads)
      : p_(p),
        dout_tensor_(dout),
        forward_(forward),
        grads_(grads),
        deep_(count_depth_tiles(p.d)),
        dp_(deep_ * kTileDepth),
        blocks_(blocks_in(p.tq)),
        keys_(blocks_in(p.tk) * kBlock * dp_),
        query_t_(memory.take<bfloat16>(blocks_ * kBlock * dp_)),
        dout_t_(memory.take<bfloat16>(blocks_ * kBlock * dp_)),
        query_(memory.take<bfloat16>(blocks_ * kBlock * dp_)),
        dout_(memory.take<bfloat16>(blocks_ * kBlock * dp_)),
        dquery_(memory.take<float>(blocks_ * kBlock * dp_)),
        lse_(memory.take<float>(blocks_ * kBlock)),
        delta_(memory.take<float>(blocks_ * kBlock)),
        key_rows_(memory.take<bfloat16>(kBlock * dp_)),
        value_rows_(memory.take<bfloat16>(kBlock * dp_)),
        key_columns_(memory.take<bfloat16>(kBlock * dp_)),
        dkey_(memory.take<float>(keys_)),
        dvalue_(memory.take<float>(keys_)),
        scores_(memory.take<float>(kTile)),
        dscores_(memory.take<float>(kTile)),
        mask_(memory.take<float>(kTile)),
        rounded_(memory.take<bfloat16>(kTile)),
        transposed_(memory.take<bfloat16>(kTile)) {}

  void group(int64_t b, int64_t key_head) {
    const auto scale = static_cast<float>(p_.options.scale);
    std::fill(dkey_, dkey_ + keys_, 0.0f);
    std::fill(dvalue_, dvalue_ + keys_, 0.0f);
    for (int64_t h = key_head * p_.group(); h < (key_head + 1) * p_.group(); ++h) {
      prepare(b, h);
      for (int64_t key0 = 0; key0 < p_.tk; key0 += kBlock) {
        const int64_t count = std::min(kBlock, p_.tk - key0);
        const Rows<const bfloat16> k = tile_rows<const bfloat16>(p_.k, b, key_head, key0),
                                   v = tile_rows<const bfloat16>(p_.v, b, key_head, key0);
        pack_rows(key_rows_, rows_run_on(k), kHalves, deep_, count, p_.d);
        pack_rows(value_rows_, rows_run_on(v), kHalves, deep_, count, p_.d);
        pack_columns(key_columns_, rows_run_on(k), deep_, kHalves, count, p_.d);
        for (int64_t query0 = 0; query0 < p_.tq; query0 += kBlock)
          if (visible_keys(p_, query0, kBlock) > key0 && first_block(starts_at(p_, b, query0, kBlock)) <= key0)
            pair(b, h, key0, query0);
      }
      scale_tile(dquery_, scale, p_.tq * dp_);
      store_head<bfloat16>(grads_.dq, {b, h, 0}, dquery_, dp_, p_.tq);
    }
    scale_tile(dkey_, scale, p_.tk * dp_);
    store_head<bfloat16>(grads_.dk, {b, key_head, 0}, dkey_, dp_, p_.tk);
    store_head<bfloat16>(grads_.dv, {b, key_head, 0}, dvalue_, dp_, p_.tk);
  }

 private:
  void prepare(int64_t b, int64_t h) {
    for (int64_t i = 0; i < blocks_; ++i) {
      const int64_t left = p_.tq - i * kBlock, at = i * kBlock * dp_;
      const Rows<const bfloat16> q = tile_rows<const bfloat16>(p_.q, b, h, i * kBlock),
                                 g = tile_rows<const bfloat16>(dout_tensor_, b, h, i * kBlock);
      pack_columns(query_t_ + at, columns_run_on(q), kHalves, deep_, p_.d, left);
      pack_columns(dout_t_ + at, columns_run_on(g), kHalves, deep_, p_.d, left);
      pack_columns(query_ + at, rows_run_on(q), deep_, kHalves, left, p_.d);
      pack_columns(dout_ + at, rows_run_on(g), deep_, kHalves, left, p_.d);
    }
    std::fill(dquery_, dquery_ + blocks_ * kBlock * dp_, 0.0f);
    const float* const lse = forward_.lse.data<float>() + (b * p_.heads + h) * p_.tq;
    const Rows<const bfloat16> g = tile_rows<const bfloat16>(dout_tensor_, b, h, 0),
                               out = tile_rows<const bfloat16>(forward_.out, b, h, 0);
    output_dots(delta_, g, out, p_.tq, p_.d);
    for (int64_t i = 0; i < blocks_ * kBlock; ++i) {
      lse_[i] = lse_or_none(lse, i, p_.tq);
      if (i >= p_.tq) delta_[i] = 0;
    }
  }

  // Tiles are keys x queries.
  void pair(int64_t b, int64_t h, int64_t key0, int64_t query0) {
    const int64_t at = query0 * dp_;
    tile_matmul<By>(packed_rows(key_rows_), deep_ * kPair, kHalves, query_t_ + at, kHalves, deep_, scores_, kBlock,
                    false);
    scale_tile(scores_, static_cast<float>(p_.options.scale), kTile);
    mask_tile(scores_, kBlock, mask_at(p_, b, key0, query0));
    probability_tile(scores_, kBlock, lse_ + query0);
    tile_matmul<By>(packed_rows(value_rows_), deep_ * kPair, kHalves, dout_t_ + at, kHalves, deep_, dscores_, kBlock,
                    false);
    if (p_.options.dropout > 0) {
      dropout_tile(mask_, kBlock, p_, b, h, key0, query0);
      multiply_tile(dscores_, dscores_, mask_, kTile);
      multiply_tile(mask_, scores_, mask_, kTile);
    }
    round_rows(rounded_, p_.options.dropout > 0 ? mask_ : scores_);
    tile_matmul<By>(plain_rows(rounded_), kTileBlock * kBlock, kHalves, dout_ + at, deep_, kHalves,
                    dvalue_ + key0 * dp_, dp_, true);
    score_gradient_tile(dscores_, scores_, kBlock, delta_ + query0);
    round_rows(rounded_, dscores_);
    tile_matmul<By>(plain_rows(rounded_), kTileBlock * kBlock, kHalves, query_ + at, deep_, kHalves, dkey_ + key0 * dp_,
                    dp_, true);
    pack_rows(transposed_, {rounded_, 1, kBlock}, kHalves, kHalves, kBlock, kBlock);
    tile_matmul<By>(packed_rows(transposed_), kHalves * kPair, kHalves, key_columns_, deep_, kHalves, dquery_ + at, dp_,
                    true);
  }

  const AttentionProblem& p_;
  const Tensor& dout_tensor_;  // dout
  const AttentionResult& forward_;
  const AttentionGradients& grads_;
  const int64_t deep_, dp_, blocks_, keys_;                               // keys_: elements of all keys
  bfloat16 *const query_t_, *const dout_t_, *const query_, *const dout_;  // of all queries
  float *const dquery_, *const lse_, *const delta_;
  bfloat16 *const key_rows_, *const value_rows_, *const key_columns_;  // of one block of keys
  float *const dkey_, *const dvalue_;                                  // of all keys
  float *const scores_, *const dscores_, *const mask_;
  bfloat16 *const rounded_, *const transposed_;
};

// Each thread's worker processes some of the key-value heads.
template <template <class> class Worker, class By, class... Rest>
void run(const AttentionProblem& p, const Rest&... rest) {
  const int64_t groups = p.batch * p.key_heads, each = Worker<By>::floats(p) + kAlignment;
  const Tensor all = p.q.make({std::min<int64_t>(threads(), groups) * each}, DType::float32, Category::workspace);
  split(groups, 1, [&](int64_t begin, int64_t end) {
    [[maybe_unused]] const typename By::Scope scope;
    Worker<By> worker(Memory(all.data<float>() + omp_get_thread_num() * each), p, rest...);
    for (int64_t task = begin; task < end; ++task) worker.group(task / p.key_heads, task % p.key_heads);
  });
}

template <template <class> class Worker, class... Rest>
void run_by_best(const AttentionProblem& p, const Rest&... rest) {
  has_amx() ? run<Worker, ByTiles>(p, rest...) : run<Worker, ByPairs>(p, rest...);
}

}  // namespace

bool supports_bf16_attention(const AttentionProblem& p) {
  return p.q.dtype() == DType::bfloat16 && p.tq >= kTileBlock && p.d >= kTileRows && (has_amx() || has_pair_products());
}

void bf16_attention(const AttentionProblem& p, const AttentionResult& result) { run_by_best<PairedForward>(p, result); }

void bf16_attention_backward(const AttentionProblem& p, const Tensor& dout, const AttentionResult& forward,
                             const AttentionGradients& gradients) {
  run_by_best<PairedBackward>(p, dout, forward, gradients);
}

}  // namespace tessera::cpu
