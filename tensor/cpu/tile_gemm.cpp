// Register blocking: 4 x 4 vectors of C stay in registers over the whole of k.
#include "tensor/cpu/tile_gemm.h"

#include "tensor/cpu/vectorize.h"
#include "tensor/math.h"

namespace tessera::cpu {
namespace {

// R rows and V vectors of C. The loop over lanes is a vector instruction: GCC's vector types are one register with
// AVX-512, two with AVX2, four with SSE.
template <class T, int R, int V>
inline void register_block(int64_t k, Strided<T> a, const T* b, int64_t ldb, T* c, int64_t ldc, bool accumulate) {
  constexpr int L = static_cast<int>(kLanes<T>);
  typedef T Lanes __attribute__((vector_size(64), aligned(sizeof(T)), may_alias));
  Lanes sum[R][V];
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < V; ++v) sum[r][v] = accumulate ? *reinterpret_cast<const Lanes*>(c + r * ldc + v * L) : Lanes{};
  for (int64_t p = 0; p < k; ++p) {
    Lanes bv[V];
    for (int v = 0; v < V; ++v) bv[v] = *reinterpret_cast<const Lanes*>(b + p * ldb + v * L);
    for (int r = 0; r < R; ++r) {
      const T s = a.data[r * a.row + p * a.col];
      for (int v = 0; v < V; ++v)
        for (int l = 0; l < L; ++l) sum[r][v][l] = math::fma(s, bv[v][l], sum[r][v][l]);
    }
  }
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < V; ++v) *reinterpret_cast<Lanes*>(c + r * ldc + v * L) = sum[r][v];
}

template <class T, int V>
void column_strip(int64_t m, int64_t k, Strided<T> a, const T* b, int64_t ldb, T* c, int64_t ldc, bool accumulate) {
  vectorized([=] {
    int64_t i = 0;
    for (; i + 4 <= m; i += 4)
      register_block<T, 4, V>(k, {a.data + i * a.row, a.row, a.col}, b, ldb, c + i * ldc, ldc, accumulate);
    for (; i < m; ++i)
      register_block<T, 1, V>(k, {a.data + i * a.row, a.row, a.col}, b, ldb, c + i * ldc, ldc, accumulate);
  });
}

}  // namespace

template <class T>
void tile_gemm(int64_t m, int64_t n, int64_t k, Strided<T> a, const T* b, int64_t ldb, T* c, int64_t ldc,
               bool accumulate) {
  constexpr int64_t L = kLanes<T>;
  int64_t j = 0;
  for (; j + 4 * L <= n; j += 4 * L) column_strip<T, 4>(m, k, a, b + j, ldb, c + j, ldc, accumulate);
  for (; j + 2 * L <= n; j += 2 * L) column_strip<T, 2>(m, k, a, b + j, ldb, c + j, ldc, accumulate);
  for (; j < n; j += L) column_strip<T, 1>(m, k, a, b + j, ldb, c + j, ldc, accumulate);
}

template void tile_gemm(int64_t, int64_t, int64_t, Strided<float>, const float*, int64_t, float*, int64_t, bool);
template void tile_gemm(int64_t, int64_t, int64_t, Strided<double>, const double*, int64_t, double*, int64_t, bool);

}  // namespace tessera::cpu
