// Tessera's CPU GEMMs: register tiles, cache-blocked GEMM for any sizes and strides, and matmuls with few rows.
#include "tensor/ops/matmul/cpu/gemm.h"

#include <algorithm>
#include <cstdint>
#include <vector>

#include "tensor/ops/matmul/cpu/lanes.h"

namespace tessera::cpu {

namespace {

// Register blocking: 6 x 2 vectors of C stay in 16 registers over the full k, or 4 x 4 in the 32 registers of AVX-512,
// so that two multiply-adds can issue per cycle and outnumber the loads.
template <class Isa>
constexpr int kBlockRows = Isa::kBytes == 64 ? 4 : 6;
template <class Isa>
constexpr int kStripVectors = Isa::kBytes == 64 ? 4 : 2;
template <class Isa, class T>
constexpr int64_t kVector = Isa::kBytes / static_cast<int64_t>(sizeof(T));

// R rows and V vectors of C.
template <class Isa, class T, int R, int V>
inline void register_block(int64_t k, Strided<T> a, const T* b, int64_t ldb, T* c, int64_t ldc, bool accumulate) {
  using Vector = typename VectorOf<T, Isa::kBytes>::type;
  constexpr int64_t L = kVector<Isa, T>;
  // Native alignment, which clang assumes for a reference.
  alignas(Isa::kBytes) Vector sum[R][V];
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < V; ++v)
      sum[r][v] = accumulate ? *reinterpret_cast<const Vector*>(c + r * ldc + v * L) : Vector{};
  for (int64_t p = 0; p < k; ++p) {
    alignas(Isa::kBytes) Vector row[V];
    for (int v = 0; v < V; ++v) row[v] = *reinterpret_cast<const Vector*>(b + p * ldb + v * L);
    for (int r = 0; r < R; ++r) {
      const T s = a.data[r * a.row + p * a.col];
      for (int v = 0; v < V; ++v) Isa::scaled_add(sum[r][v], s, row[v]);
    }
  }
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < V; ++v) *reinterpret_cast<Vector*>(c + r * ldc + v * L) = sum[r][v];
}

template <class Isa, class T, int V>
inline void column_strip(int64_t m, int64_t k, Strided<T> a, const T* b, int64_t ldb, T* c, int64_t ldc,
                         bool accumulate) {
  int64_t i = 0;
  const auto rows = [&]<int R>() {
    for (; i + R <= m; i += R)
      register_block<Isa, T, R, V>(k, {a.data + i * a.row, a.row, a.col}, b, ldb, c + i * ldc, ldc, accumulate);
  };
  rows.template operator()<kBlockRows<Isa>>();
  if constexpr (kBlockRows<Isa> != 4) rows.template operator()<4>();
  rows.template operator()<1>();
}

template <class Isa, class T>
inline void all_strips(int64_t m, int64_t n, int64_t k, Strided<T> a, const T* b, int64_t ldb, T* c, int64_t ldc,
                       bool accumulate) {
  constexpr int64_t L = kVector<Isa, T>, kStrip = kStripVectors<Isa> * L;
  int64_t j = 0;
  for (; j + kStrip <= n; j += kStrip)
    column_strip<Isa, T, kStripVectors<Isa>>(m, k, a, b + j, ldb, c + j, ldc, accumulate);
  for (; j < n; j += L) column_strip<Isa, T, 1>(m, k, a, b + j, ldb, c + j, ldc, accumulate);
}

}  // namespace

template <class T>
void tile_gemm(int64_t m, int64_t n, int64_t k, Strided<T> a, const T* b, int64_t ldb, T* c, int64_t ldc,
               bool accumulate, InstructionSet isa) {
  run_for(isa, [=](auto set) { all_strips<decltype(set)>(m, n, k, a, b, ldb, c, ldc, accumulate); });
}

template void tile_gemm(int64_t, int64_t, int64_t, Strided<float>, const float*, int64_t, float*, int64_t, bool,
                        InstructionSet);
template void tile_gemm(int64_t, int64_t, int64_t, Strided<double>, const double*, int64_t, double*, int64_t, bool,
                        InstructionSet);

// Cache blocking: a strip of B (kDepth x kStripVectors vectors) stays in L1 (L2 with AVX-512) while rows of A stream
// past, and a block of A's rows stays in L2.

namespace {

constexpr int64_t kDepth = 256, kRows = 96, kColumns = 1024;

// C (m x n) of one thread, with buffers for strips of B and for A if its rows are not contiguous.
template <class Isa, class T>
struct Blocks {
  static constexpr int64_t kStrip = kStripVectors<Isa> * kVector<Isa, T>;
  int64_t m, n, k;
  Strided<T> a, b;
  T* c;
  int64_t ldc;
  std::vector<T>& workspace;

  // Row stride kStrip, zero-padded beyond the columns of B.
  void copy_strip(T* to, const T* from, int64_t depth, int64_t width) const {
    for (int64_t p = 0; p < depth; ++p)
      for (int64_t j = 0; j < kStrip; ++j) to[p * kStrip + j] = j < width ? from[p * b.row + j * b.col] : T(0);
  }
  static constexpr int64_t kPitch = kDepth + kLanes<T>, kBand = 16;
  void copy_rows(T* to, const T* from, int64_t rows, int64_t depth) const {
    for (int64_t i = 0; i < rows; i += kBand)
      for (int64_t p = 0; p < depth; ++p)
        for (int64_t r = i; r < std::min(rows, i + kBand); ++r) to[r * kPitch + p] = from[r * a.row + p * a.col];
  }
  void strip(int64_t rows, int64_t width, int64_t depth, Strided<T> left, const T* right, T* to,
             bool accumulate) const {
    if (width == kStrip)
      return column_strip<Isa, T, kStripVectors<Isa>>(rows, depth, left, right, kStrip, to, ldc, accumulate);
    T edge[kRows * kStrip];  // the last columns do not fill a strip
    for (int64_t i = 0; i < rows; ++i)
      for (int64_t j = 0; j < kStrip; ++j) edge[i * kStrip + j] = accumulate && j < width ? to[i * ldc + j] : T(0);
    column_strip<Isa, T, kStripVectors<Isa>>(rows, depth, left, right, kStrip, edge, kStrip, accumulate);
    for (int64_t i = 0; i < rows; ++i)
      for (int64_t j = 0; j < width; ++j) to[i * ldc + j] = edge[i * kStrip + j];
  }
  void run() const {
    const int64_t rows_workspace = a.col == 1 ? 0 : kRows * kPitch;
    workspace.resize(
        std::max(workspace.size(),
                 static_cast<size_t>(rows_workspace + std::min(kDepth, k) * (std::min(kColumns, n) + kStrip))));
    T* const strips = workspace.data() + rows_workspace;
    for (int64_t j0 = 0; j0 < n; j0 += kColumns)
      for (int64_t p0 = 0; p0 < k; p0 += kDepth) {
        const int64_t columns = std::min(kColumns, n - j0), depth = std::min(kDepth, k - p0);
        for (int64_t j = 0; j < columns; j += kStrip)
          copy_strip(strips + j * depth, b.data + p0 * b.row + (j0 + j) * b.col, depth, std::min(kStrip, columns - j));
        for (int64_t i = 0; i < m; i += kRows) {
          const int64_t rows = std::min(kRows, m - i);
          Strided<T> left{a.data + i * a.row + p0 * a.col, a.row, a.col};
          if (rows_workspace > 0) {
            copy_rows(workspace.data(), left.data, rows, depth);
            left = {workspace.data(), kPitch, 1};
          }
          for (int64_t j = 0; j < columns; j += kStrip)
            strip(rows, std::min(kStrip, columns - j), depth, left, strips + j * depth, c + i * ldc + j0 + j, p0 > 0);
        }
      }
  }
};

}  // namespace

template <class T>
void gemm(int64_t m, int64_t n, int64_t k, Strided<T> a, Strided<T> b, T* c, int64_t ldc) {
  if (m == 0) return;
  if (k == 0) {
    for (int64_t i = 0; i < m; ++i) std::fill(c + i * ldc, c + i * ldc + n, T(0));
    return;
  }
  const auto compute = [&](int64_t i0, int64_t i1, int64_t j0, int64_t j1) {
    thread_local std::vector<T> workspace;
    run_for(instruction_set(), [&](auto set) {
      Blocks<decltype(set), T>{i1 - i0,
                               j1 - j0,
                               k,
                               {a.data + i0 * a.row, a.row, a.col},
                               {b.data + j0 * b.col, b.row, b.col},
                               c + i0 * ldc + j0,
                               ldc,
                               workspace}
          .run();
    });
  };
  constexpr int64_t kStrips = 4 * kLanes<T>;
  const bool small = m * n * k < 65536;
  if (n >= kStrips * threads())
    split(n, small ? n : kStrips, [&](int64_t j0, int64_t j1) { compute(0, m, j0, j1); });
  else
    split(m, small ? m : kRows, [&](int64_t i0, int64_t i1) { compute(i0, i1, 0, n); });
}

template void gemm(int64_t, int64_t, int64_t, Strided<double>, Strided<double>, double*, int64_t);
template void gemm(int64_t, int64_t, int64_t, Strided<float>, Strided<float>, float*, int64_t);

// A block of four rows of x and four of the weight stays in registers over the full inner dim. Element k belongs to
// lane k mod 16, and lanes are added in pairs, so results are bitwise identical on all instruction sets.

namespace {

constexpr int64_t kMaxRows = 8;       // of x; beyond that, oneDNN's copy of the weight is profitable
constexpr int64_t kColumnGrain = 64;  // of y

template <class Y, class T>
struct FewRows {
  int64_t m, k, lda, ldw, ldy;
  const T *x, *w;
  const Y* bias;
  Y* y;

  // M rows and R columns of y.
  template <class Isa, int M, int R>
  void block(int64_t row, int64_t column) const {
    using Lanes = typename Isa::Lanes;
    const T *const a = x + row * lda, *const b = w + column * ldw;
    Lanes sum[M][R] = {};
    const auto add = [&](const T* left, int64_t left_row, const T* right, int64_t right_row) {
      Lanes in[M], weight;
      for (int i = 0; i < M; ++i) Isa::load(in[i], left + i * left_row);
      for (int r = 0; r < R; ++r) {
        Isa::load(weight, right + r * right_row);
        __builtin_prefetch(right + (r + R) * right_row);  // the hardware does not prefetch such short rows
        for (int i = 0; i < M; ++i) Isa::fma(sum[i][r], in[i], weight);
      }
    };
    int64_t p = 0;
    for (; p + kSumLanes <= k; p += kSumLanes) add(a + p, lda, b + p, ldw);
    if (p < k) {
      T left[M][kSumLanes] = {}, right[R][kSumLanes] = {};
      for (int i = 0; i < M; ++i) std::copy_n(a + i * lda + p, k - p, left[i]);
      for (int r = 0; r < R; ++r) std::copy_n(b + r * ldw + p, k - p, right[r]);
      add(left[0], kSumLanes, right[0], kSumLanes);
    }
    for (int i = 0; i < M; ++i)
      for (int r = 0; r < R; ++r) {
        const float total = Isa::total(sum[i][r]);
        y[(row + i) * ldy + column + r] = Y(bias ? total + static_cast<float>(bias[column + r]) : total);
      }
  }
  template <class Isa, int R>
  void columns(int64_t column) const {
    int64_t i = 0;
    for (; i + 4 <= m; i += 4) block<Isa, 4, R>(i, column);
    for (; i < m; ++i) block<Isa, 1, R>(i, column);
  }
  template <class Isa>
  void range(int64_t begin, int64_t end) const {
    for (; begin + 4 <= end; begin += 4) columns<Isa, 4>(begin);
    for (; begin < end; ++begin) columns<Isa, 1>(begin);
  }
};

template <class Y, class T>
void run(const Tensor& out, const Tensor& a, const Tensor& b, const Tensor& bias, InstructionSet isa) {
  const FewRows<Y, T> rows{a.dim(0),         a.dim(1),    a.strides()[0], b.strides()[1],
                           out.strides()[0], a.data<T>(), b.data<T>(),    bias.defined() ? bias.data<Y>() : nullptr,
                           out.data<Y>()};
  split(b.dim(1), kColumnGrain, [&](int64_t begin, int64_t end) {
    run_for(isa, [=](auto set) { rows.template range<decltype(set)>(begin, end); });
  });
}

}  // namespace

bool few_rows_supports(const Tensor& a, const Tensor& b) {
  return a.dim(0) <= kMaxRows && a.strides()[1] == 1 && b.strides()[0] == 1;
}

void few_rows_matmul(Tensor& out, const Tensor& a, const Tensor& b, const Tensor& bias, InstructionSet isa) {
  if (a.dtype() == DType::float32) return run<float, float>(out, a, b, bias, isa);
  if (out.dtype() == DType::float32) return run<float, bfloat16>(out, a, b, bias, isa);
  run<bfloat16, bfloat16>(out, a, b, bias, isa);
}

}  // namespace tessera::cpu
