// The processor's matrix tiles (Intel AMX, "Intel 64 and IA-32 Architectures Software Developer's Manual", volume 1,
// chapter 18): eight registers of 16 rows of 64 bytes, and one instruction that multiplies two of bfloat16 into one of
// float32. Used where the processor's feature flags and the system say that they are there.
#pragma once
#include <immintrin.h>

#include <cstring>

#include "tensor/dtype.h"

namespace tessera::cpu {

inline constexpr int64_t kTileRows = 16;                          // rows of any tile; columns of a float32 tile
inline constexpr int64_t kTileDepth = 32;                         // bfloat16 elements of a tile's row
inline constexpr int64_t kTileElements = kTileRows * kTileDepth;  // elements of a bfloat16 tile: 1 KiB
inline constexpr int64_t kTileBlock = 2 * kTileRows;              // rows and columns of C that are made at once

// Configures all eight tiles, for the calling thread, as 16 rows of 64 bytes; releases them at the end of the scope.
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

// C (32 x 32 float32, rows `ldc` apart) = or += A B over `tiles` tiles of depth 32. A has two tiles of 16 rows, each
// row `lda` elements from the next, `a_step` elements from one tile of depth to the next and `a_down` from the upper
// tile to the lower. B is packed: for each tile of depth two tiles side by side, each 16 pairs of rows x 16 columns
// x 2.
// `beside(t)` is called after the multiplications of tile t were issued: other work that overlaps with them.
struct TileOperandA {
  const bfloat16* data;
  int64_t lda, step, down;
};
template <class F>
[[gnu::target("amx-tile,amx-bf16,avx512f,avx512bw,avx512vl,avx512bf16"), gnu::always_inline]] inline void tile_block(
    TileOperandA a, const bfloat16* b, int64_t tiles, float* c, int64_t ldc, bool accumulate, const F& beside) {
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
    beside(t);
    a.data += a.step;
    b += 2 * kTileElements;
  }
  _tile_stored(0, c, c_bytes);
  _tile_stored(1, c + kTileRows, c_bytes);
  _tile_stored(2, c + kTileRows * ldc, c_bytes);
  _tile_stored(3, c + kTileRows * ldc + kTileRows, c_bytes);
}

// The blocks of tensor/cpu/x86/amx.h without tiles: an instruction of AVX512_BF16 (vdpbf16ps) adds the products of
// sixteen pairs of bfloat16 to sixteen float32, twice the work of a fused multiply-add of float32.

// C (32 x 32) = or += A B with the operands of tile_block(): 8 rows of 32 columns at a time, which stay in registers
// over the whole inner dim. Each element of C is one chain of pairs in their order.
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

// Bringing bfloat16 matrices into the order in which tiles want them, 32 x 32 elements at a time.
//
// A tile of A is 16 rows of 32 elements along the inner dim. A tile of B is 16 pairs of inner rows x 16 columns, the
// two elements of a pair side by side. So a matrix whose rows run on needs its pairs of rows interleaved to be a B and,
// when it is used transposed, 16 x 16 pairs transposed to be an A; and the other way round.

// g++ 12 takes its own intrinsics' undefined operand for a mistake (GCC bug 105593).
#pragma GCC diagnostic push
#ifndef __clang__
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif
#pragma GCC diagnostic ignored "-Wuninitialized"

namespace tessera::cpu {

// A matrix in memory; one of the strides is 1.
struct Bf16View {
  const bfloat16* data;
  int64_t row, col;
  Bf16View at(int64_t i, int64_t j) const { return {data + i * row + j * col, row, col}; }
};

// Rows become columns for 16 rows of 16 pairs.
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
  // Quarter q of r[4 i + c] now holds column 4 q + c of rows 4 i to 4 i + 3.
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

// For pairs of rows that run on, 32 columns: where the elements of the left and of the right 16 columns come from.
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

// 32 rows of 32 elements, `stride` apart, into two tiles whose rows are pairs of these rows: a B, from a matrix of
// inner rows that run on.
[[gnu::target("avx512f,avx512bw")]] inline void interleave_block(bfloat16* to, const bfloat16* from, int64_t stride) {
  const __m512i to_left = _mm512_load_si512(kPairOrder.left), to_right = _mm512_load_si512(kPairOrder.right);
  for (int p = 0; p < 16; ++p) {
    const __m512i even = _mm512_loadu_si512(from + 2 * p * stride);
    const __m512i odd = _mm512_loadu_si512(from + (2 * p + 1) * stride);
    _mm512_store_si512(to + p * 32, _mm512_permutex2var_epi16(even, to_left, odd));
    _mm512_store_si512(to + kTileElements + p * 32, _mm512_permutex2var_epi16(even, to_right, odd));
  }
}

// 32 rows of 32 elements into two tiles, of rows 0 to 15 and 16 to 31, whose rows are pairs of columns: a B, from a
// matrix of columns that run on.
[[gnu::target("avx512f")]] inline void transpose_block(bfloat16* to, const bfloat16* from, int64_t stride) {
  for (int half = 0; half < 2; ++half) {
    __m512i r[16];
    for (int i = 0; i < 16; ++i) r[i] = _mm512_loadu_si512(from + (16 * half + i) * stride);
    transpose_pairs(r);
    for (int i = 0; i < 16; ++i) _mm512_store_si512(to + half * kTileElements + i * 32, r[i]);
  }
}

// 32 rows of 32 elements, which are inner rows, into two tiles of the left and the right 16 columns, each a row of 32
// inner elements: an A, from a matrix that is used transposed.
[[gnu::target("avx512f,avx512bw")]] inline void turn_block(bfloat16* to, const bfloat16* from, int64_t stride) {
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

// A 32 x 32 block of which only rows x cols elements are there, padded with zeros so that the functions above can read.
struct PaddedBlock {
  alignas(64) bfloat16 data[32 * 32] = {};
  PaddedBlock(const bfloat16* from, int64_t stride, int64_t rows, int64_t cols) {
    for (int64_t i = 0; i < rows; ++i) std::copy(from + i * stride, from + i * stride + cols, data + i * 32);
  }
};

// The block of B at (inner, column), of which `depth` x `cols` elements are there, as two tiles.
inline void pack_b_block(bfloat16* to, Bf16View b, int64_t depth, int64_t cols) {
  const bool rows_run_on = b.col == 1, whole = depth >= 32 && cols >= 32;
  const int64_t stride = rows_run_on ? b.row : b.col;
  const auto go = rows_run_on ? interleave_block : transpose_block;
  if (whole) return go(to, b.data, stride);
  const int64_t d = std::min<int64_t>(depth, 32), c = std::min<int64_t>(cols, 32);
  const PaddedBlock padded(b.data, stride, rows_run_on ? d : c, rows_run_on ? c : d);
  go(to, padded.data, 32);
}

// The block of A at (row, inner), as two tiles, upper and lower.
inline void pack_a_block(bfloat16* to, Bf16View a, int64_t rows, int64_t depth) {
  const bool rows_run_on = a.col == 1, whole = depth >= 32 && rows >= 32;
  const int64_t stride = rows_run_on ? a.row : a.col;
  const auto go = rows_run_on ? copy_block : turn_block;
  if (whole) return go(to, a.data, stride);
  const int64_t r = std::min<int64_t>(rows, 32), d = std::min<int64_t>(depth, 32);
  const PaddedBlock padded(a.data, stride, rows_run_on ? r : d, rows_run_on ? d : r);
  go(to, padded.data, 32);
}

}  // namespace tessera::cpu

#pragma GCC diagnostic pop
