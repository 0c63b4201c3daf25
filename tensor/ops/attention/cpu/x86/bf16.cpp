// CPU bfloat16 attention: matmuls of 64 x 64 tiles.
//
// A left operand of 64 rows (A) is packed as blocks of 32 rows, a right operand of 64 columns (B) as panels of 32
// columns; for every 32 inner elements, each has two tiles, 1024 elements in total.

#include <algorithm>
#include <array>
#include <cstdint>

#include "tensor/cpu/x86/amx.h"
#include "tensor/ops/attention/cpu/blocks.h"

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

namespace {

int64_t depth_tiles(int64_t d) { return (d + kTileDepth - 1) / kTileDepth; }

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

// A key-value head's keys and values are packed once and used by every block of queries of the heads that share it.
template <class By>
struct PairTiles {
  using Stored = bfloat16;
  using Element = bfloat16;
  using Sum = float;
  using Scope = typename By::Scope;
  using From = Rows<const bfloat16>;
  static constexpr bool kScalesQueries = false, kPacksAllKeys = true, kTransposes = true, kRounds = true;
  static int64_t width(const AttentionProblem& /*p*/) { return kBlock; }
  static int64_t padded(int64_t d) { return depth_tiles(d) * kTileDepth; }

  static void pack_left(bfloat16* to, From from, int64_t count, int64_t d) {
    pack_rows(to, rows_run_on(from), kHalves, depth_tiles(d), count, d);
  }
  static void pack_values(bfloat16* to, From from, int64_t count, int64_t d) {
    pack_rows(to, columns_run_on(from), depth_tiles(d), kHalves, d, count);
  }
  static void pack_right(bfloat16* to, From from, int64_t count, int64_t d, float /*factor*/) {
    pack_columns(to, rows_run_on(from), depth_tiles(d), kHalves, count, d);
  }
  static void pack_right_transposed(bfloat16* to, int64_t /*width*/, From from, int64_t count, int64_t d,
                                    float /*factor*/) {
    pack_columns(to, columns_run_on(from), kHalves, depth_tiles(d), d, count);
  }

  struct Left {
    TileOperandA a;
    int64_t block;  // stride between blocks of 32 rows
  };
  static Left left(const bfloat16* packed, int64_t d) {
    return {{packed, kTileDepth, kPair, kTileElements}, depth_tiles(d) * kPair};
  }
  static const bfloat16* round_right(bfloat16* to, const float* tile, int64_t /*n*/) {
    round_columns(to, tile);
    return to;
  }
  static const bfloat16* round_left(bfloat16* to, const float* tile) {
    round_rows(to, tile);
    return to;
  }
  static Left left_tile(const bfloat16* rows) {
    return {{rows, kBlock, kTileDepth, kTileRows * kBlock}, kTileBlock * kBlock};
  }
  static Left left_tile_transposed(bfloat16* memory, const bfloat16* rows) {
    pack_rows(memory, {rows, 1, kBlock}, kHalves, kHalves, kBlock, kBlock);
    return left(memory, kBlock);
  }
  static void multiply(int64_t m, int64_t n, int64_t k, Left left, const bfloat16* b, float* c, bool accumulate) {
    const int64_t deep = depth_tiles(k);
    for (int64_t i = 0; i < m / kTileBlock; ++i)
      for (int64_t j = 0; j < n / kTileBlock; ++j)
        By::block({left.a.data + i * left.block, left.a.lda, left.a.step, left.a.down}, b + j * deep * kPair, deep,
                  c + i * kTileBlock * n + j * kTileBlock, n, accumulate);
  }

  // The output is D x queries.
  static void add_values(float* out, const bfloat16* weights, const bfloat16* values, int64_t width, int64_t ld,
                         bool accumulate) {
    multiply(ld, width, kBlock, left(values, kBlock), weights, out, accumulate);
  }
  static void scale_queries(float* out, const float* by, int64_t width, int64_t ld) {
    vectorized([=] {
      for (int64_t c = 0; c < ld; ++c)
        for (int64_t i = 0; i < width; ++i) out[c * width + i] *= by[i];
    });
  }
  static const float* rows(float* memory, const float* out, int64_t width, int64_t ld) {
    transpose_floats(memory, out, ld, width);
    return memory;
  }
};

template <template <class> class Worker, class... Rest>
void run_by_best(const AttentionProblem& p, const Rest&... rest) {
  has_amx() ? run_blocks<Worker, PairTiles<ByTiles>>(p, rest...) : run_blocks<Worker, PairTiles<ByPairs>>(p, rest...);
}

}  // namespace

bool supports_bf16_attention(const AttentionProblem& p) {
  return p.q.dtype() == DType::bfloat16 && p.tq >= kTileBlock && p.d >= kTileRows && (has_amx() || has_pair_products());
}

void bf16_attention(const AttentionProblem& p, const AttentionResult& result) {
  run_by_best<AttentionForward>(p, result);
}

void bf16_attention_backward(const AttentionProblem& p, const Tensor& dout, const AttentionResult& forward,
                             const AttentionGradients& gradients) {
  run_by_best<AttentionBackward>(p, dout, forward, gradients);
}

}  // namespace tessera::cpu
