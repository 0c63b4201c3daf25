// Products of 64 x 64 tiles, and the forms in which they take their operands.
//
// An operand of 64 rows (A) is packed as blocks of 32 rows, an operand of 64 columns (B) as panels of 32 columns;
// either holds for each 32 of the inner dim two tiles, 1024 elements.
#pragma once
#include <array>
#include <cstdint>

#include "tensor/cpu/amx_pack.h"
#include "tensor/cpu/pairs.h"
#include "tensor/ops/attention/cpu/tiles.h"

namespace tessera::cpu {

inline constexpr int64_t kPair = 2 * kTileElements;
inline constexpr int64_t kHalves = kBlock / kTileBlock;  // blocks of 32 in a tile of 64

// What lies at (row, col) of one (b, h), rows running on, and the same turned over.
inline Bf16View rows_run_on(Rows<const bfloat16> r) { return {r.data, r.stride, 1}; }
inline Bf16View columns_run_on(Rows<const bfloat16> r) { return {r.data, 1, r.stride}; }

// rows x depth elements of `a`, as blocks of 32 rows; what is not there is zero.
inline void pack_rows(bfloat16* to, Bf16View a, int64_t blocks, int64_t deep, int64_t rows, int64_t depth) {
  for (int64_t i = 0; i < blocks; ++i)
    for (int64_t d = 0; d < deep; ++d, to += kPair)
      pack_a_block(to, a.at(i * kTileBlock, d * kTileDepth), rows - i * kTileBlock, depth - d * kTileDepth);
}
// depth x cols elements of `b`, as panels of 32 columns.
inline void pack_columns(bfloat16* to, Bf16View b, int64_t panels, int64_t deep, int64_t depth, int64_t cols) {
  for (int64_t j = 0; j < panels; ++j)
    for (int64_t d = 0; d < deep; ++d, to += kPair)
      pack_b_block(to, b.at(d * kTileDepth, j * kTileBlock), depth - d * kTileDepth, cols - j * kTileBlock);
}

// What multiplies a 32 x 32 block: the processor's tiles, or its pair products.
struct ByTiles {
  using Scope = TileScope;
  struct NothingBeside {
    [[gnu::always_inline]] void operator()(int64_t) const {}
  };
  [[gnu::target("amx-tile,amx-bf16,avx512f,avx512bw,avx512vl,avx512bf16")]] static void block(
      TileOperandA a, const bfloat16* b, int64_t deep, float* c, int64_t ldc, bool accumulate) {
    tile_block(a, b, deep, c, ldc, accumulate, NothingBeside{});
  }
};
struct ByPairs {
  struct Scope {};
  static void block(TileOperandA a, const bfloat16* b, int64_t deep, float* c, int64_t ldc, bool accumulate) {
    pair_block(a, b, deep, c, ldc, accumulate);
  }
};

// C (32 blocks x 32 panels) = or += A B; `a_block` elements from one block of rows of A to the next.
template <class By>
void tile_product(TileOperandA a, int64_t a_block, int64_t blocks, const bfloat16* b, int64_t panels, int64_t deep,
                  float* c, int64_t ldc, bool accumulate) {
  for (int64_t i = 0; i < blocks; ++i)
    for (int64_t j = 0; j < panels; ++j)
      By::block({a.data + i * a_block, a.lda, a.step, a.down}, b + j * deep * kPair, deep,
                c + i * kTileBlock * ldc + j * kTileBlock, ldc, accumulate);
}
// A as pack_rows() left it.
inline TileOperandA packed_rows(const bfloat16* a) { return {a, kTileDepth, kPair, kTileElements}; }
// A as rows of 64 elements.
inline TileOperandA plain_rows(const bfloat16* a) { return {a, kBlock, kTileDepth, kTileRows * kBlock}; }

// 64 x 64 float32 rounded to bfloat16, row by row.
[[gnu::target("avx512f,avx512bf16")]] inline void round_rows(bfloat16* to, const float* from) {
  for (int64_t i = 0; i < kBlock * kBlock; i += 32)
    _mm512_store_si512(to + i, reinterpret_cast<__m512i>(
                                   _mm512_cvtne2ps_pbh(_mm512_load_ps(from + i + 16), _mm512_load_ps(from + i))));
}

// The same as a B of inner dim 64 (the rows) and 64 columns.
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

// rows x cols float32 turned over; both multiples of 16.
[[gnu::target("avx512f")]] inline void turn_floats(float* to, const float* from, int64_t rows, int64_t cols) {
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

}  // namespace tessera::cpu
