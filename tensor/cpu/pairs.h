// The blocks of tensor/cpu/amx.h without tiles: an instruction of AVX512_BF16 (vdpbf16ps) adds the products of sixteen
// pairs of bfloat16 to sixteen float32, twice the work of a fused multiply-add of float32.
#pragma once
#include <immintrin.h>

#include <cstdint>
#include <cstring>

#include "tensor/cpu/amx.h"

namespace tessera::cpu {

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
