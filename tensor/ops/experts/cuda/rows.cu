// Grouped GEMM for float32 and float64, bitwise identical to the CPU: each element is one chain of fused multiply-adds
// in the order of the inner dim, in one thread's register.
//
// A block computes a tile of 16 kPer rows and columns, a thread kPer x kPer elements of it. Slabs of the operands with
// inner depth 16 are double-buffered in shared memory: the next one is prefetched into registers.
#include <cstdint>
#include <vector>

#include "tensor/cuda/loops.cuh"
#include "tensor/math.h"
#include "tensor/ops/experts/cuda/rows.cuh"

namespace tessera::cuda {
namespace {

constexpr int kDepth = 16, kSide = 16, kBlockThreads = kSide * kSide;

// [inner][line]; the row stride spreads a line over the banks.
template <class T, int kPer>
struct alignas(32) Slab {
  static constexpr int kLines = kSide * kPer;
  T at[kDepth][kLines + 4];
};

template <class T, int kPer, bool kAlong>
struct Fetched {
  static constexpr int kLines = Slab<T, kPer>::kLines;
  T values[kPer];

  // Adjacent threads read adjacent elements.
  static __device__ int line(int t, int i) { return kAlong ? t / kDepth + i * (kBlockThreads / kDepth) : t % kLines; }
  static __device__ int depth(int t, int i) { return kAlong ? t % kDepth : t / kLines + i * (kBlockThreads / kLines); }
  __device__ void fetch(const T* from, int line0, int lines, int inner0, int inner) {
    int t = static_cast<int>(threadIdx.x);
    asm volatile("" : "+r"(t));  // recompute in each iteration: live addresses would spill the accumulators
#pragma unroll
    for (int i = 0; i < kPer; ++i) {
      const int l = line0 + line(t, i), k = inner0 + depth(t, i);
      const int64_t at = kAlong ? static_cast<int64_t>(l) * inner + k : static_cast<int64_t>(k) * lines + l;
      values[i] = l < lines && k < inner ? from[at] : T(0);
    }
  }
  __device__ void put(Slab<T, kPer>& slab) const {
    const int t = static_cast<int>(threadIdx.x);
#pragma unroll
    for (int i = 0; i < kPer; ++i) slab.at[depth(t, i)][line(t, i)] = values[i];
  }
};

// A thread has four adjacent lines out of every 64.
__device__ inline int to_line(int side, int i) { return i / 4 * (4 * kSide) + side * 4 + i % 4; }

template <class T, int kPer>
__device__ void read_lines(const Slab<T, kPer>& slab, int k, int side, T (&to)[kPer]) {
#pragma unroll
  for (int i = 0; i < kPer; i += 4) {
    const Packed<T, 4> four = load<4>(&slab.at[k][to_line(side, i)]);
#pragma unroll
    for (int e = 0; e < 4; ++e) to[i + e] = four.v[e];
  }
}

template <class T, bool kLeftAlong>
using Call = GroupedCall<T, T, !kLeftAlong>;

template <class T, int kPer, bool kLeftAlong, bool kRightAlong>
__global__ __launch_bounds__(kBlockThreads, 2) void rows_kernel(const __grid_constant__ Call<T, kLeftAlong> call) {
  __shared__ Slab<T, kPer> left, right;
  const GroupTile at = find_tile<kSide * kPer>(call, static_cast<int>(blockIdx.x));
  const auto of = load_factors(call, at.group);
  const int down = static_cast<int>(threadIdx.x) / kSide, across = static_cast<int>(threadIdx.x) % kSide;
  Fetched<T, kPer, kLeftAlong> of_left;
  Fetched<T, kPer, kRightAlong> of_right;
  const auto fetch = [&](int k) {
    of_left.fetch(of.left, at.row, of.rows, k, of.inner);
    of_right.fetch(of.right, at.column, of.columns, k, of.inner);
  };
  T sums[kPer][kPer] = {};
  fetch(0);
  for (int k0 = 0; k0 < of.inner; k0 += kDepth) {
    __syncthreads();  // the previous slabs have been read
    of_left.put(left);
    of_right.put(right);
    __syncthreads();
    if (k0 + kDepth < of.inner) fetch(k0 + kDepth);
    const int depth = of.inner - k0 < kDepth ? of.inner - k0 : kDepth;
#pragma unroll 2
    for (int k = 0; k < depth; ++k) {
      T a[kPer], b[kPer];
      read_lines<T, kPer>(left, k, down, a);
      read_lines<T, kPer>(right, k, across, b);
#pragma unroll
      for (int i = 0; i < kPer; ++i)
#pragma unroll
        for (int j = 0; j < kPer; ++j) sums[i][j] = math::fma(a[i], b[j], sums[i][j]);
    }
  }
#pragma unroll
  for (int i = 0; i < kPer; ++i)
#pragma unroll
    for (int j = 0; j < kPer; ++j) {
      const int row = at.row + to_line(down, i), column = at.column + to_line(across, j);
      if (row >= of.rows || column >= of.columns) continue;
      T& to = of.out[static_cast<int64_t>(row) * of.columns + column];
      to = of.adds ? to + sums[i][j] : sums[i][j];
    }
}

template <class T, int kPer>
void queue(GemmKind which, const Tensor& left, const Tensor& other, const std::vector<GemmGroup>& groups) {
  with_lines(which, [&](auto of_left, auto of_right) {
    constexpr bool kLeft = decltype(of_left)::value, kRight = decltype(of_right)::value;
    for_each_launch<T, T, !kLeft>(which, left, other, groups, kSide * kPer, [&](const auto& call, int64_t blocks) {
      launch(context(left), "grouped_linear", {.blocks = blocks, .threads = kBlockThreads},
             rows_kernel<T, kPer, kLeft, kRight>, call);
    });
  });
}

}  // namespace

void grouped_gemm(GemmKind which, const Tensor& left, const Tensor& other, const std::vector<GemmGroup>& groups) {
  if (left.dtype() == DType::bfloat16) return grouped_gemm_bf16(which, left, other, groups);
  if (left.dtype() == DType::float64) {
    if constexpr (kFloat64Kernels)
      return queue<double, 4>(which, left, other, groups);
    else
      reject_float64(left.dtype(), "grouped_linear");
  }
  if (small_tiles(which, left, other, groups, kSide * 8))
    queue<float, 4>(which, left, other, groups);
  else
    queue<float, 8>(which, left, other, groups);
}

}  // namespace tessera::cuda
