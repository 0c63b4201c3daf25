// Intel AMX ("Intel 64 and IA-32 Architectures Software Developer's Manual", volume 1, chapter 18): eight tile
// registers of 16 rows of 64 bytes; one instruction multiplies two bfloat16 tiles and accumulates in float32.
#pragma once
#include <immintrin.h>

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "tensor/dtype.h"

namespace tessera::cpu {

inline constexpr int64_t kTileRows = 16;                          // also columns of a float32 tile
inline constexpr int64_t kTileDepth = 32;                         // bfloat16 elements per tile row
inline constexpr int64_t kTileElements = kTileRows * kTileDepth;  // 1 KiB
inline constexpr int64_t kTileBlock = 2 * kTileRows;              // rows and columns of C per call

// Configures the thread's eight tiles.
class TileScope {
 public:
  [[gnu::target("amx-tile")]] TileScope() {
    alignas(64) static constexpr uint8_t kConfig[64] = {
        1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 64, 0,  64, 0,  64, 0,  64, 0,  64, 0, 64, 0, 64, 0, 64, 0,
        0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 16, 16, 16, 16, 16, 16, 16, 16, 0,  0, 0,  0, 0,  0, 0,  0};
    _tile_loadconfig(kConfig);
  }
  [[gnu::target("amx-tile")]] ~TileScope() { _tile_release(); }
  TileScope(const TileScope&) = delete;
  TileScope& operator=(const TileScope&) = delete;
};

// C (32 x 32 float32, row stride `ldc`) = or += A B over `tiles` tiles of depth 32. A has two tiles of 16 rows with row
// stride `lda`; `step` is the stride along the depth, `down` from the upper to the lower tile. B is packed: per depth
// step, two adjacent tiles of 16 row pairs x 16 columns x 2. `overlapped(t)` runs during the multiplication of tile t.
struct TileOperandA {
  const bfloat16* data;
  int64_t lda, step, down;
};
template <class F>
[[gnu::target("amx-tile,amx-bf16,avx512f,avx512bw,avx512vl,avx512bf16"), gnu::always_inline]] inline void tile_block(
    TileOperandA a, const bfloat16* b, int64_t tiles, float* c, int64_t ldc, bool accumulate, const F& overlapped) {
  const auto a_bytes = static_cast<size_t>(a.lda) * sizeof(bfloat16),
             c_bytes = static_cast<size_t>(ldc) * sizeof(float);
  if (accumulate) {
    _tile_loadd(0, c, c_bytes);
    _tile_loadd(1, c + kTileRows, c_bytes);
    _tile_loadd(2, c + kTileRows * ldc, c_bytes);
    _tile_loadd(3, c + kTileRows * ldc + kTileRows, c_bytes);
  } else {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  }
  for (int64_t t = 0; t < tiles; ++t) {
    _tile_loadd(6, b, 64);
    _tile_loadd(4, a.data, a_bytes);
    _tile_loadd(7, b + kTileElements, 64);
    _tile_loadd(5, a.data + a.down, a_bytes);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
    overlapped(t);
    a.data += a.step;
    b += 2 * kTileElements;
  }
  _tile_stored(0, c, c_bytes);
  _tile_stored(1, c + kTileRows, c_bytes);
  _tile_stored(2, c + kTileRows * ldc, c_bytes);
  _tile_stored(3, c + kTileRows * ldc + kTileRows, c_bytes);
}

// Fallback: vdpbf16ps (AVX512_BF16) accumulates the dot products of sixteen bfloat16 pairs in float32, at twice the
// throughput of an FMA.

// tile_block() without AMX: 8 rows of 32 columns stay in registers over the inner dim; each element of C accumulates
// pairs in order.
[[gnu::target("avx512f,avx512bf16")]] inline void pair_block(TileOperandA a, const bfloat16* b, int64_t tiles, float* c,
                                                             int64_t ldc, bool accumulate) {
  constexpr int kRows = 8;
  for (int64_t first = 0; first < kTileBlock; first += kRows, c += kRows * ldc) {
    const bfloat16* const rows = a.data + first / kTileRows * a.down + first % kTileRows * a.lda;
    __m512 sum[kRows][2];
    for (int r = 0; r < kRows; ++r)
      for (int v = 0; v < 2; ++v)
        sum[r][v] = accumulate ? _mm512_loadu_ps(c + r * ldc + v * kTileRows) : _mm512_setzero_ps();
    for (int64_t t = 0; t < tiles; ++t)
      for (int64_t p = 0; p < kTileDepth; p += 2) {
        const bfloat16 *const left = b + t * 2 * kTileElements + p * kTileRows, *const right = left + kTileElements;
        const auto b0 = reinterpret_cast<__m512bh>(_mm512_load_si512(left)),
                   b1 = reinterpret_cast<__m512bh>(_mm512_load_si512(right));
        for (int r = 0; r < kRows; ++r) {
          int32_t pair = 0;
          std::memcpy(&pair, rows + r * a.lda + t * a.step + p, sizeof(pair));
          const auto both = reinterpret_cast<__m512bh>(_mm512_set1_epi32(pair));
          sum[r][0] = _mm512_dpbf16_ps(sum[r][0], both, b0);
          sum[r][1] = _mm512_dpbf16_ps(sum[r][1], both, b1);
        }
      }
    for (int r = 0; r < kRows; ++r)
      for (int v = 0; v < 2; ++v) _mm512_storeu_ps(c + r * ldc + v * kTileRows, sum[r][v]);
  }
}

}  // namespace tessera::cpu

// Packing into tiles, 32 x 32 elements at a time.
//
// A tile of A is 16 rows of 32 inner elements; a tile of B is 16 inner row pairs x 16 columns, with pairs adjacent. A
// row-major B: interleave its row pairs. A column-major B: transpose its 16 x 16 pairs. A row-major A is copied; a
// column-major A (a row-major matrix used transposed): interleave row pairs, then transpose 16 x 16 pairs.

// g++ 12 warns about its own intrinsics (GCC bug 105593).
#pragma GCC diagnostic push
#ifndef __clang__
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif
#pragma GCC diagnostic ignored "-Wuninitialized"

namespace tessera::cpu {

// One of the strides is 1.
struct Bf16View {
  const bfloat16* data;
  int64_t row, col;
  Bf16View at(int64_t i, int64_t j) const { return {data + i * row + j * col, row, col}; }
};

[[gnu::target("avx512f")]] inline void transpose_pairs(__m512i (&r)[16]) {
  __m512i t[16];
  for (int i = 0; i < 16; i += 2) {
    t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
    t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
  }
  for (int i = 0; i < 16; i += 4) {
    r[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
    r[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
    r[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
    r[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
  }
  // Now quarter q of r[4 i + c] holds column 4 q + c of rows 4 i to 4 i + 3.
  for (int c = 0; c < 4; ++c) {
    const __m512i even_low = _mm512_shuffle_i32x4(r[c], r[4 + c], 0x88);
    const __m512i odd_low = _mm512_shuffle_i32x4(r[c], r[4 + c], 0xdd);
    const __m512i even_high = _mm512_shuffle_i32x4(r[8 + c], r[12 + c], 0x88);
    const __m512i odd_high = _mm512_shuffle_i32x4(r[8 + c], r[12 + c], 0xdd);
    t[c] = _mm512_shuffle_i32x4(even_low, even_high, 0x88);
    t[4 + c] = _mm512_shuffle_i32x4(odd_low, odd_high, 0x88);
    t[8 + c] = _mm512_shuffle_i32x4(even_low, even_high, 0xdd);
    t[12 + c] = _mm512_shuffle_i32x4(odd_low, odd_high, 0xdd);
  }
  for (int i = 0; i < 16; ++i) r[i] = t[i];
}

// Source indices of the left and right 16 columns of interleaved row pairs.
struct PairOrder {
  alignas(64) uint16_t left[32], right[32];
};
inline constexpr PairOrder kPairOrder = [] {
  PairOrder order{};
  for (int i = 0; i < 32; ++i) {
    order.left[i] = static_cast<uint16_t>(i / 2 + (i % 2) * 32);
    order.right[i] = static_cast<uint16_t>(order.left[i] + 16);
  }
  return order;
}();

// B from a row-major matrix: 32 rows into two tiles of interleaved row pairs.
[[gnu::target("avx512f,avx512bw")]] inline void interleave_block(bfloat16* to, const bfloat16* from, int64_t stride) {
  const __m512i to_left = _mm512_load_si512(kPairOrder.left), to_right = _mm512_load_si512(kPairOrder.right);
  for (int p = 0; p < 16; ++p) {
    const __m512i even = _mm512_loadu_si512(from + 2 * p * stride);
    const __m512i odd = _mm512_loadu_si512(from + (2 * p + 1) * stride);
    _mm512_store_si512(to + p * 32, _mm512_permutex2var_epi16(even, to_left, odd));
    _mm512_store_si512(to + kTileElements + p * 32, _mm512_permutex2var_epi16(even, to_right, odd));
  }
}

// B from a column-major matrix: two tiles of rows 0 to 15 and 16 to 31, whose rows are column pairs.
[[gnu::target("avx512f")]] inline void transpose_block(bfloat16* to, const bfloat16* from, int64_t stride) {
  for (int half = 0; half < 2; ++half) {
    __m512i r[16];
    for (int i = 0; i < 16; ++i) r[i] = _mm512_loadu_si512(from + (16 * half + i) * stride);
    transpose_pairs(r);
    for (int i = 0; i < 16; ++i) _mm512_store_si512(to + half * kTileElements + i * 32, r[i]);
  }
}

// A from a matrix used transposed: 32 inner rows into two tiles of the left and right 16 columns.
[[gnu::target("avx512f,avx512bw")]] inline void transpose_a(bfloat16* to, const bfloat16* from, int64_t stride) {
  const __m512i to_left = _mm512_load_si512(kPairOrder.left), to_right = _mm512_load_si512(kPairOrder.right);
  __m512i left[16], right[16];
  for (int p = 0; p < 16; ++p) {
    const __m512i even = _mm512_loadu_si512(from + 2 * p * stride);
    const __m512i odd = _mm512_loadu_si512(from + (2 * p + 1) * stride);
    left[p] = _mm512_permutex2var_epi16(even, to_left, odd);
    right[p] = _mm512_permutex2var_epi16(even, to_right, odd);
  }
  transpose_pairs(left);
  transpose_pairs(right);
  for (int i = 0; i < 16; ++i) {
    _mm512_store_si512(to + i * 32, left[i]);
    _mm512_store_si512(to + kTileElements + i * 32, right[i]);
  }
}

[[gnu::target("avx512f")]] inline void copy_block(bfloat16* to, const bfloat16* from, int64_t stride) {
  for (int i = 0; i < 32; ++i) _mm512_store_si512(to + i * 32, _mm512_loadu_si512(from + i * stride));
}

// A zero-padded 32 x 32 block with rows x cols valid elements.
struct PaddedBlock {
  alignas(64) bfloat16 data[32 * 32] = {};
  PaddedBlock(const bfloat16* from, int64_t stride, int64_t rows, int64_t cols) {
    for (int64_t i = 0; i < rows; ++i) std::copy(from + i * stride, from + i * stride + cols, data + i * 32);
  }
};

// Packs a block of rows x cols elements (those beyond 32 are ignored), by one function if its rows are contiguous and
// by the other if its columns are.
inline void pack_block(bfloat16* to, Bf16View m, int64_t rows, int64_t cols,
                       void (*by_rows)(bfloat16*, const bfloat16*, int64_t),
                       void (*by_columns)(bfloat16*, const bfloat16*, int64_t)) {
  const bool rows_run_on = m.col == 1;
  const int64_t stride = rows_run_on ? m.row : m.col;
  const auto pack = rows_run_on ? by_rows : by_columns;
  if (rows >= 32 && cols >= 32) return pack(to, m.data, stride);
  const int64_t r = std::min<int64_t>(rows, 32), c = std::min<int64_t>(cols, 32);
  const PaddedBlock padded(m.data, stride, rows_run_on ? r : c, rows_run_on ? c : r);
  pack(to, padded.data, 32);
}

// The block of B at (inner, column) as two tiles.
inline void pack_b_block(bfloat16* to, Bf16View b, int64_t depth, int64_t cols) {
  pack_block(to, b, depth, cols, interleave_block, transpose_block);
}

// The block of A at (row, inner) as two tiles, upper and lower.
inline void pack_a_block(bfloat16* to, Bf16View a, int64_t rows, int64_t depth) {
  pack_block(to, a, rows, depth, copy_block, transpose_a);
}

}  // namespace tessera::cpu

#pragma GCC diagnostic pop
