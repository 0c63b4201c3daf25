// CPU matmul in leaves. A tile of C stays in registers over a leaf; the tree's pending partial sums of the tile stay in
// L1. Panels of A and strips of B are copied in the order of accumulation, so leaves may consist of any runs of
// indices.
#include "tensor/ops/matmul/cpu/leaf_gemm.h"

#include <algorithm>
#include <cstdint>
#include <span>
#include <string>
#include <type_traits>
#include <vector>

#include "tensor/cpu/vectorize.h"
#include "tensor/ops/matmul/cpu/gemm.h"
#include "tensor/ops/matmul/cpu/lanes.h"

namespace tessera::cpu {

namespace {

// 12 x 2 vectors of C in the 32 registers of AVX-512, 6 x 2 in 16 registers.
template <class Isa>
constexpr int kPanelRows = Isa::kBytes == 64 ? 12 : 6;
constexpr int kPanelVectors = 2;
constexpr int kMaxLevels = 3;
static_assert(int64_t{1} << kMaxLevels == kLeaves);

// Elements of a block of packed A and of packed B: one streams from L2 or L3, of the other a strip stays in L2.
constexpr int64_t kBlockOfA = int64_t{1} << 19, kBlockOfB = int64_t{1} << 20;

// C (R rows, row stride ldc) of a packed panel of A and a packed strip of B. `A` accumulates.
template <class Isa, class A>
inline void leaf_tile(const int64_t* ends, int64_t leaves, const A* a, const A* b, A* c, int64_t ldc) {
  using Vector = typename VectorOf<A, Isa::kBytes>::type;
  constexpr int R = kPanelRows<Isa>, V = kPanelVectors;
  constexpr int64_t L = Isa::kBytes / static_cast<int64_t>(sizeof(A));
  alignas(64) A pending[kMaxLevels][R * V * L];
  int64_t p = 0;
  for (int64_t leaf = 0; leaf < leaves; ++leaf) {
    alignas(Isa::kBytes) Vector sum[R][V];
    for (int r = 0; r < R; ++r)
      for (int v = 0; v < V; ++v) sum[r][v] = Vector{};
    for (; p < ends[leaf]; ++p) {
      alignas(Isa::kBytes) Vector row[V];
      for (int v = 0; v < V; ++v) row[v] = *reinterpret_cast<const Vector*>(b + (p * V + v) * L);
      for (int r = 0; r < R; ++r)
        for (int v = 0; v < V; ++v) Isa::scaled_add(sum[r][v], a[p * R + r], row[v]);
    }
    int level = 0;
    for (; (leaf >> level & 1) != 0; ++level)
      for (int r = 0; r < R; ++r)
        for (int v = 0; v < V; ++v)
          sum[r][v] = *reinterpret_cast<const Vector*>(pending[level] + (r * V + v) * L) + sum[r][v];
    const bool last = leaf + 1 == leaves;
    A* const to = last ? c : pending[level];
    const int64_t pitch = last ? ldc : V * L;
    for (int r = 0; r < R; ++r)
      for (int v = 0; v < V; ++v) *reinterpret_cast<Vector*>(to + r * pitch + v * L) = sum[r][v];
  }
}

template <class T>
using WideOf = Accumulate<T>;

// One thread's C (m x n).
template <class Isa, class T, class Y>
struct LeafBlocks {
  using A = WideOf<T>;
  static constexpr int64_t kRows = kPanelRows<Isa>,
                           kStrip = kPanelVectors * Isa::kBytes / static_cast<int64_t>(sizeof(A));
  int64_t m, n;
  Strided<T> a, b;
  Y* c;
  int64_t ldc;
  const LeafOrder& order;

  // to[p][i] = x(p, i) for i < width, zero beyond; x has strides `along` the leaves and `across`.
  template <int64_t Width>
  void pack(A* to, const T* x, int64_t along, int64_t across, int64_t width) const {
    for (const LeafOrder::Run& run : order.runs) {
      const T* const from = x + run.begin * along;
      if (across == 1 && width == Width) {
        for (int64_t p = 0; p < run.size; ++p)
          for (int64_t i = 0; i < Width; ++i) to[p * Width + i] = static_cast<A>(from[p * along + i]);
      } else if (width == Width) {
        constexpr int64_t kBand = 64;  // of `to` in L1
        for (int64_t p0 = 0; p0 < run.size; p0 += kBand)
          for (int64_t i = 0; i < Width; ++i)
            for (int64_t p = p0; p < std::min(run.size, p0 + kBand); ++p)
              to[p * Width + i] = static_cast<A>(from[p * along + i * across]);
      } else {
        for (int64_t p = 0; p < run.size; ++p)
          for (int64_t i = 0; i < Width; ++i)
            to[p * Width + i] = i < width ? static_cast<A>(from[p * along + i * across]) : A(0);
      }
      to += run.size * Width;
    }
  }

  void tile(const A* panel, const A* strip, Y* to, int64_t rows, int64_t columns) const {
    const auto leaves = std::ssize(order.ends);
    if constexpr (std::is_same_v<A, Y>)
      if (rows == kRows && columns == kStrip) return leaf_tile<Isa>(order.ends.data(), leaves, panel, strip, to, ldc);
    alignas(64) A edge[kRows * kStrip];
    leaf_tile<Isa>(order.ends.data(), leaves, panel, strip, edge, kStrip);
    for (int64_t i = 0; i < rows; ++i)
      for (int64_t j = 0; j < columns; ++j) to[i * ldc + j] = Y(edge[i * kStrip + j]);
  }

  void run() const {
    const int64_t k = order.size();
    const auto multiple = [k](int64_t elements, int64_t of) {
      return std::max(of, elements / std::max<int64_t>(k, 1) / of * of);
    };
    const int64_t rows = std::min(multiple(kBlockOfA, kRows), (m + kRows - 1) / kRows * kRows),
                  columns = std::min(multiple(kBlockOfB, kStrip), (n + kStrip - 1) / kStrip * kStrip);
    thread_local std::vector<A> of_a, of_b;
    of_a.resize(std::max(of_a.size(), static_cast<size_t>(rows * k)));
    of_b.resize(std::max(of_b.size(), static_cast<size_t>(columns * k)));
    for (int64_t j0 = 0; j0 < n; j0 += columns) {
      const int64_t width = std::min(columns, n - j0);
      for (int64_t j = 0; j < width; j += kStrip)
        pack<kStrip>(of_b.data() + j * k, b.data + (j0 + j) * b.col, b.row, b.col, std::min(kStrip, width - j));
      for (int64_t i0 = 0; i0 < m; i0 += rows) {
        const int64_t height = std::min(rows, m - i0);
        for (int64_t i = 0; i < height; i += kRows)
          pack<kRows>(of_a.data() + i * k, a.data + (i0 + i) * a.row, a.col, a.row, std::min(kRows, height - i));
        for (int64_t j = 0; j < width; j += kStrip)
          for (int64_t i = 0; i < height; i += kRows)
            tile(of_a.data() + i * k, of_b.data() + j * k, c + (i0 + i) * ldc + j0 + j, std::min(kRows, height - i),
                 std::min(kStrip, width - j));
      }
    }
  }
};

template <class T, class Y>
void leaf_gemm(const Tensor& out, const Tensor& at, const Tensor& bt, const LeafOrder& order, InstructionSet isa) {
  const Strided<T> a{at.data<T>(), at.strides()[0], at.strides()[1]}, b{bt.data<T>(), bt.strides()[0], bt.strides()[1]};
  const int64_t m = at.dim(0), n = bt.dim(1), ldc = out.strides()[0];
  Y* const c = out.data<Y>();
  const auto compute = [&](int64_t i0, int64_t i1, int64_t j0, int64_t j1) {
    run_for(isa, [&, i0, i1, j0, j1](auto set) {
      LeafBlocks<decltype(set), T, Y>{
          i1 - i0, j1 - j0, {a.data + i0 * a.row, a.row, a.col}, {b.data + j0 * b.col, b.row, b.col}, c + i0 * ldc + j0,
          ldc,     order}
          .run();
    });
  };
  constexpr int64_t kGrainOfRows = 48, kGrainOfColumns = 64;
  const bool small = m * n * order.size() < 65536;
  if (n >= m)
    split(n, small ? n : kGrainOfColumns, [&](int64_t j0, int64_t j1) { compute(0, m, j0, j1); });
  else
    split(m, small ? m : kGrainOfRows, [&](int64_t i0, int64_t i1) { compute(i0, i1, 0, n); });
}

}  // namespace

void leaf_matmul(const Tensor& out, const Tensor& a, const Tensor& b, const LeafOrder& order, InstructionSet isa) {
  if (a.dtype() != b.dtype() || order.size() != a.dim(1) || order.size() != b.dim(0))
    throw Error("[leaf_matmul] a is " + a.describe() + ", b is " + b.describe() + "; expected equal dtypes and " +
                std::to_string(order.size()) + " contracted elements");
  with_floating(a.dtype(), "leaf_matmul", [&]<class T>(T) {
    if (out.dtype() == kDTypeOf<WideOf<T>>) return leaf_gemm<T, WideOf<T>>(out, a, b, order, isa);
    if (out.dtype() != kDTypeOf<T>)
      throw Error("[leaf_matmul] out is " + out.describe() + "; expected the dtype of a, or its accumulation dtype");
    leaf_gemm<T, T>(out, a, b, order, isa);
  });
}

}  // namespace tessera::cpu
