// AVX2 and AVX-512 versions of gemm.cpp's Baseline, bitwise identical to it.
//
// Fused multiply-adds use intrinsics, because not every compiler recognizes them in a loop over lanes (g++ 13 and 14
// were five times slower).
#pragma once
#include <immintrin.h>

#include "tensor/cpu/vectorize.h"
#include "tensor/dtype.h"

namespace tessera::cpu {

struct Avx2 {
  static constexpr int kBytes = 32;
  [[gnu::target("avx2,fma")]] static void scaled_add(VectorOf<float, 32>::type& c, float s,
                                                     const VectorOf<float, 32>::type& b) {
    c = _mm256_fmadd_ps(_mm256_set1_ps(s), b, c);
  }
  [[gnu::target("avx2,fma")]] static void scaled_add(VectorOf<double, 32>::type& c, double s,
                                                     const VectorOf<double, 32>::type& b) {
    c = _mm256_fmadd_pd(_mm256_set1_pd(s), b, c);
  }
  struct Lanes {
    __m256 half[2];
  };
  [[gnu::target("avx2")]] static void load(Lanes& to, const float* p) {
    for (int h = 0; h < 2; ++h) to.half[h] = _mm256_loadu_ps(p + 8 * h);
  }
  [[gnu::target("avx2")]] static void load(Lanes& to, const bfloat16* p) {
    for (int h = 0; h < 2; ++h) {
      const __m128i packed = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p) + h);
      to.half[h] = _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(packed), 16));
    }
  }
  [[gnu::target("avx2,fma")]] static void fma(Lanes& sum, const Lanes& a, const Lanes& b) {
    for (int h = 0; h < 2; ++h) sum.half[h] = _mm256_fmadd_ps(a.half[h], b.half[h], sum.half[h]);
  }
  [[gnu::target("avx2")]] static float total(const Lanes& sum) { return total(sum.half[0], sum.half[1]); }
  [[gnu::target("avx2")]] static float total(const __m256& low, const __m256& high) {
    const __m256 eight = _mm256_add_ps(low, high);
    const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
  }
};
struct Avx512 {
  static constexpr int kBytes = 64;
  [[gnu::target("avx512f")]] static void scaled_add(VectorOf<float, 64>::type& c, float s,
                                                    const VectorOf<float, 64>::type& b) {
    c = _mm512_fmadd_ps(_mm512_set1_ps(s), b, c);
  }
  [[gnu::target("avx512f")]] static void scaled_add(VectorOf<double, 64>::type& c, double s,
                                                    const VectorOf<double, 64>::type& b) {
    c = _mm512_fmadd_pd(_mm512_set1_pd(s), b, c);
  }
  using Lanes = __m512;
  static constexpr __mmask16 kAll = 0xffff;  // g++ 12 warns about the unmasked forms
  [[gnu::target("avx512f")]] static void load(Lanes& to, const float* p) { to = _mm512_loadu_ps(p); }
  [[gnu::target("avx512f")]] static void load(Lanes& to, const bfloat16* p) {
    const __m256i packed = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    to = _mm512_castsi512_ps(_mm512_maskz_slli_epi32(kAll, _mm512_maskz_cvtepu16_epi32(kAll, packed), 16));
  }
  [[gnu::target("avx512f")]] static void fma(Lanes& sum, const Lanes& a, const Lanes& b) {
    sum = _mm512_fmadd_ps(a, b, sum);
  }
  [[gnu::target("avx512f,avx512dq")]] static float total(const Lanes& sum) {
    return Avx2::total(_mm512_maskz_extractf32x8_ps(0xff, sum, 0), _mm512_maskz_extractf32x8_ps(0xff, sum, 1));
  }
};

}  // namespace tessera::cpu
