// Register blocking: 4 x 4 vectors of C stay in registers over the whole of k.
//
// The fused multiply-add of a vector is written with the instruction's intrinsic: compilers find it behind a loop over
// lanes in some versions (g++ 12) and not in others (g++ 13 and 14 were five times slower).
#include "tensor/cpu/tile_gemm.h"

#include <immintrin.h>

#include "tensor/math.h"

namespace tessera::cpu {
namespace {

template <class T, int Bytes>
struct VectorOf {
  typedef T type __attribute__((vector_size(Bytes), aligned(sizeof(T)), may_alias));
};

// c += s b on one vector, for each of the instruction sets of vectorize.h. All three round alike.
struct Avx512 {
  static constexpr int kBytes = 64;
  [[gnu::target("avx512f")]] static void fma(VectorOf<float, 64>::type& c, float s,
                                             const VectorOf<float, 64>::type& b) {
    c = _mm512_fmadd_ps(_mm512_set1_ps(s), b, c);
  }
  [[gnu::target("avx512f")]] static void fma(VectorOf<double, 64>::type& c, double s,
                                             const VectorOf<double, 64>::type& b) {
    c = _mm512_fmadd_pd(_mm512_set1_pd(s), b, c);
  }
};
struct Avx2 {
  static constexpr int kBytes = 32;
  [[gnu::target("avx2,fma")]] static void fma(VectorOf<float, 32>::type& c, float s,
                                              const VectorOf<float, 32>::type& b) {
    c = _mm256_fmadd_ps(_mm256_set1_ps(s), b, c);
  }
  [[gnu::target("avx2,fma")]] static void fma(VectorOf<double, 32>::type& c, double s,
                                              const VectorOf<double, 32>::type& b) {
    c = _mm256_fmadd_pd(_mm256_set1_pd(s), b, c);
  }
};
struct Baseline {
  static constexpr int kBytes = 16;
  static void fma(VectorOf<float, 16>::type& c, float s, const VectorOf<float, 16>::type& b) {
    for (int l = 0; l < 4; ++l) c[l] = math::fma(s, b[l], c[l]);
  }
  static void fma(VectorOf<double, 16>::type& c, double s, const VectorOf<double, 16>::type& b) {
    for (int l = 0; l < 2; ++l) c[l] = math::fma(s, b[l], c[l]);
  }
};

// R rows and V vectors of C.
template <class Isa, class T, int R, int V>
inline void register_block(int64_t k, Strided<T> a, const T* b, int64_t ldb, T* c, int64_t ldc, bool accumulate) {
  using Vector = typename VectorOf<T, Isa::kBytes>::type;
  constexpr int64_t L = Isa::kBytes / static_cast<int64_t>(sizeof(T));
  // Aligned like the instruction set's own vectors, which clang takes a reference to one for.
  alignas(Isa::kBytes) Vector sum[R][V];
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < V; ++v)
      sum[r][v] = accumulate ? *reinterpret_cast<const Vector*>(c + r * ldc + v * L) : Vector{};
  for (int64_t p = 0; p < k; ++p) {
    alignas(Isa::kBytes) Vector row[V];
    for (int v = 0; v < V; ++v) row[v] = *reinterpret_cast<const Vector*>(b + p * ldb + v * L);
    for (int r = 0; r < R; ++r) {
      const T s = a.data[r * a.row + p * a.col];
      for (int v = 0; v < V; ++v) Isa::fma(sum[r][v], s, row[v]);
    }
  }
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < V; ++v) *reinterpret_cast<Vector*>(c + r * ldc + v * L) = sum[r][v];
}

// V vectors wide, over all rows.
template <class Isa, class T, int V>
inline void column_strip(int64_t m, int64_t k, Strided<T> a, const T* b, int64_t ldb, T* c, int64_t ldc,
                         bool accumulate) {
  int64_t i = 0;
  for (; i + 4 <= m; i += 4)
    register_block<Isa, T, 4, V>(k, {a.data + i * a.row, a.row, a.col}, b, ldb, c + i * ldc, ldc, accumulate);
  for (; i < m; ++i)
    register_block<Isa, T, 1, V>(k, {a.data + i * a.row, a.row, a.col}, b, ldb, c + i * ldc, ldc, accumulate);
}

template <class Isa, class T>
inline void whole(int64_t m, int64_t n, int64_t k, Strided<T> a, const T* b, int64_t ldb, T* c, int64_t ldc,
                  bool accumulate) {
  constexpr int64_t L = Isa::kBytes / static_cast<int64_t>(sizeof(T));
  constexpr int kWide = Isa::kBytes == 64 ? 4 : 2;  // 16 sums in 32 registers, or 8 in 16
  int64_t j = 0;
  for (; j + kWide * L <= n; j += kWide * L) column_strip<Isa, T, kWide>(m, k, a, b + j, ldb, c + j, ldc, accumulate);
  for (; j < n; j += L) column_strip<Isa, T, 1>(m, k, a, b + j, ldb, c + j, ldc, accumulate);
}

}  // namespace

template <class T>
void tile_gemm(int64_t m, int64_t n, int64_t k, Strided<T> a, const T* b, int64_t ldb, T* c, int64_t ldc,
               bool accumulate, InstructionSet isa) {
  switch (isa) {
    case InstructionSet::avx512:
      return run_avx512([=] { whole<Avx512>(m, n, k, a, b, ldb, c, ldc, accumulate); });
    case InstructionSet::avx2:
      return run_avx2([=] { whole<Avx2>(m, n, k, a, b, ldb, c, ldc, accumulate); });
    case InstructionSet::baseline:
      return run_baseline([=] { whole<Baseline>(m, n, k, a, b, ldb, c, ldc, accumulate); });
  }
}

template void tile_gemm(int64_t, int64_t, int64_t, Strided<float>, const float*, int64_t, float*, int64_t, bool,
                        InstructionSet);
template void tile_gemm(int64_t, int64_t, int64_t, Strided<double>, const double*, int64_t, double*, int64_t, bool,
                        InstructionSet);

}  // namespace tessera::cpu
