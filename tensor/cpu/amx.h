// The processor's matrix tiles (Intel AMX, "Intel 64 and IA-32 Architectures Software Developer's Manual", volume 1,
// chapter 18): eight registers of 16 rows of 64 bytes, and one instruction that multiplies two of bfloat16 into one of
// float32. Used where the processor's feature flags and the system say that they are there.
#pragma once
#include <immintrin.h>

#include <cstdint>
#include <cstring>

#include "tensor/dtype.h"

namespace tessera::cpu {

// Whether this process may use the tiles. TESSERA_AMX=0 says no, for tests and comparisons.
bool has_amx();
// Whether the processor has AVX-512 with the pair products of bfloat16 (AVX512_BF16).
bool has_pair_products();

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

// The blocks of tensor/cpu/amx.h without tiles: an instruction of AVX512_BF16 (vdpbf16ps) adds the products of sixteen
// pairs of bfloat16 to sixteen float32, twice the work of a fused multiply-add of float32.

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
