// Blocks of k and of columns, so that a panel of B stays in the second-level cache while rows of A stream past.
#include <algorithm>
#include <vector>

#include "tensor/cpu/vectorize.h"
#include "tensor/ops/matmul/cpu/products.h"

namespace tessera::cpu {
namespace {

constexpr int64_t kDepth = 256, kRows = 48;

// Rows [i0, i1) of the column strip at j0, whose B panel (depth x width, zero-padded) is packed.
template <class T>
void strip(int64_t i0, int64_t i1, int64_t width, int64_t valid, int64_t depth, Strided<T> a, const T* panel, T* c,
           int64_t ldc, bool accumulate) {
  if (valid == width) {
    tile_gemm<T>(i1 - i0, width, depth, a, panel, width, c, ldc, accumulate);
    return;
  }
  T edge[kRows * 4 * kLanes<T>];  // the last columns do not fill a vector: through a padded tile
  for (int64_t i = 0; i < i1 - i0; ++i)
    for (int64_t j = 0; j < width; ++j) edge[i * width + j] = accumulate && j < valid ? c[i * ldc + j] : T(0);
  tile_gemm<T>(i1 - i0, width, depth, a, panel, width, edge, width, accumulate);
  for (int64_t i = 0; i < i1 - i0; ++i)
    for (int64_t j = 0; j < valid; ++j) c[i * ldc + j] = edge[i * width + j];
}

template <class T>
void columns(int64_t j0, int64_t j1, int64_t m, int64_t k, Strided<T> a, Strided<T> b, T* c, int64_t ldc) {
  const int64_t valid = j1 - j0, width = (valid + kLanes<T> - 1) / kLanes<T> * kLanes<T>;
  std::vector<T> panel(static_cast<size_t>(kDepth * width));
  for (int64_t p0 = 0; p0 < k; p0 += kDepth) {
    const int64_t depth = std::min(kDepth, k - p0);
    for (int64_t p = 0; p < depth; ++p)
      for (int64_t j = 0; j < width; ++j)
        panel[static_cast<size_t>(p * width + j)] = j < valid ? b.data[(p0 + p) * b.row + (j0 + j) * b.col] : T(0);
    for (int64_t i = 0; i < m; i += kRows) {
      const Strided<T> rows{a.data + i * a.row + p0 * a.col, a.row, a.col};
      strip<T>(i, std::min(m, i + kRows), width, valid, depth, rows, panel.data(), c + i * ldc + j0, ldc, p0 > 0);
    }
  }
}

}  // namespace

template <class T>
void gemm(int64_t m, int64_t n, int64_t k, Strided<T> a, Strided<T> b, T* c, int64_t ldc) {
  if (m == 0) return;
  if (k == 0) {
    for (int64_t i = 0; i < m; ++i) std::fill(c + i * ldc, c + i * ldc + n, T(0));
    return;
  }
  constexpr int64_t kStrip = 4 * kLanes<T>;
  const int64_t strips = (n + kStrip - 1) / kStrip;
  const auto run = [&](int64_t s, int64_t i0, int64_t i1) {
    columns<T>(s * kStrip, std::min(n, (s + 1) * kStrip), i1 - i0, k, {a.data + i0 * a.row, a.row, a.col}, b,
               c + i0 * ldc, ldc);
  };
  const int64_t work = m * n * k;
  if (strips >= threads())
    split(strips, work < 65536 ? strips : 1, [&](int64_t s0, int64_t s1) {
      for (int64_t s = s0; s < s1; ++s) run(s, 0, m);
    });
  else
    split(m, work < 65536 ? m : kRows, [&](int64_t i0, int64_t i1) {
      for (int64_t s = 0; s < strips; ++s) run(s, i0, i1);
    });
}

template void gemm(int64_t, int64_t, int64_t, Strided<double>, Strided<double>, double*, int64_t);
template void gemm(int64_t, int64_t, int64_t, Strided<float>, Strided<float>, float*, int64_t);

}  // namespace tessera::cpu
