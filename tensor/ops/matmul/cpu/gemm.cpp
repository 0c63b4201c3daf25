// The CPU's own products: of tiles in registers, of any sizes and strides by blocks that stay in the caches, and of few
// rows.

#include "tensor/math.h"
#include "tensor/ops/matmul/cpu/products.h"
#ifdef __x86_64__
#include "tensor/ops/matmul/cpu/x86/lanes.h"
#endif

namespace tessera::cpu {

namespace {

constexpr int64_t kSumLanes = 16;

// The baseline of vectorize.h; the other sets of x86-64 (x86/lanes.h) round alike. scaled_add(): c +=
// s b on one vector of kBytes. Of sixteen float32 in Lanes: load() from memory, fma() is sum += a b, and total() the
// sum of the lanes, of l and l + 8, then of l and l + 4, and so on.
struct Baseline {
  static constexpr int kBytes = 16;
  static void scaled_add(VectorOf<float, 16>::type& c, float s, const VectorOf<float, 16>::type& b) {
    for (int l = 0; l < 4; ++l) c[l] = math::fma(s, b[l], c[l]);
  }
  static void scaled_add(VectorOf<double, 16>::type& c, double s, const VectorOf<double, 16>::type& b) {
    for (int l = 0; l < 2; ++l) c[l] = math::fma(s, b[l], c[l]);
  }
  struct Lanes {
    float lane[kSumLanes];
  };
  template <class T>
  static void load(Lanes& to, const T* p) {
    for (int l = 0; l < kSumLanes; ++l) to.lane[l] = static_cast<float>(p[l]);
  }
  static void fma(Lanes& sum, const Lanes& a, const Lanes& b) {
    for (int l = 0; l < kSumLanes; ++l) sum.lane[l] = math::fma(a.lane[l], b.lane[l], sum.lane[l]);
  }
  static float total(Lanes sum) {
    for (int64_t width = kSumLanes / 2; width > 0; width /= 2)
      for (int64_t l = 0; l < width; ++l) sum.lane[l] += sum.lane[l + width];
    return sum.lane[0];
  }
};

// Runs f(Avx512{}), f(Avx2{}) or f(Baseline{}), all of it compiled for that set.
template <class F>
void run_for([[maybe_unused]] InstructionSet isa, const F& f) {
#ifdef __x86_64__
  if (isa == InstructionSet::avx512) return run_avx512([f] { f(Avx512{}); });
  if (isa == InstructionSet::avx2) return run_avx2([f] { f(Avx2{}); });
#endif
  run_baseline([f] { f(Baseline{}); });
}

// Tiles. Register blocking: 4 x 4 vectors of C stay in registers over the whole of k.

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
      for (int v = 0; v < V; ++v) Isa::scaled_add(sum[r][v], s, row[v]);
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
  run_for(isa, [=](auto set) { whole<decltype(set)>(m, n, k, a, b, ldb, c, ldc, accumulate); });
}

template void tile_gemm(int64_t, int64_t, int64_t, Strided<float>, const float*, int64_t, float*, int64_t, bool,
                        InstructionSet);
template void tile_gemm(int64_t, int64_t, int64_t, Strided<double>, const double*, int64_t, double*, int64_t, bool,
                        InstructionSet);

// Blocks of k and of columns, so that a panel of B stays in the second-level cache while rows of A stream past.

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

// A block of four rows of x and four of the weight is in registers over the whole inner dim. Element k of a sum belongs
// to lane k mod 16, and the lanes are added in pairs: all three instruction sets round alike.

namespace {

constexpr int64_t kMostRows = 8;      // rows of x; with more, oneDNN's copy of the weight pays
constexpr int64_t kColumnGrain = 64;  // columns of y

template <class Y, class T>
struct FewRows {
  int64_t m, k, lda, ldw, ldy;
  const T *x, *w;
  const Y* bias;  // or null
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
        __builtin_prefetch(right + (r + R) * right_row);  // the next block: the processor foresees no rows so short
        for (int i = 0; i < M; ++i) Isa::fma(sum[i][r], in[i], weight);
      }
    };
    int64_t p = 0;
    for (; p + kSumLanes <= k; p += kSumLanes) add(a + p, lda, b + p, ldw);
    if (p < k) {  // the rest, filled up with zeros
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

bool few_rows_takes(const Tensor& a, const Tensor& b) {
  return a.dim(0) <= kMostRows && a.strides()[1] == 1 && b.strides()[0] == 1;
}

void few_rows_matmul(Tensor& out, const Tensor& a, const Tensor& b, const Tensor& bias, InstructionSet isa) {
  if (a.dtype() == DType::float32) return run<float, float>(out, a, b, bias, isa);
  if (out.dtype() == DType::float32) return run<float, bfloat16>(out, a, b, bias, isa);
  run<bfloat16, bfloat16>(out, a, b, bias, isa);
}

}  // namespace tessera::cpu
