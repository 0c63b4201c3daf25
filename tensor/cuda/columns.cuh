// Columns of a matrix (n, c), by threads that each have the 16 bytes of some neighbouring columns in some rows; and
// sums over rows, in two passes of a fixed shape: rows are added in order, 64 at a time, and then those sums.
#pragma once
#include <algorithm>
#include <cstdint>

#include "tensor/cuda/rows.cuh"

namespace tessera::cuda {

inline constexpr int64_t kRowsTogether = 64;  // rows that are added first
inline constexpr int64_t kPartsInRun = 32;    // of those sums, added next

struct Columns {
  int64_t rows = 0;
  int length = 0;  // columns
  int64_t rows_per_thread = 1;
  // Of a thread for each part of a row and each run of rows.
  template <class T>
  Grid grid() const {
    return {.blocks = blocks_for(blocks_for(length, kPart<T>) * blocks_for(rows, rows_per_thread), kThreads)};
  }
};

struct ColumnThread {
  int j = 0;                    // the first of its columns
  int64_t first = 0, last = 0;  // its rows
  int64_t run = 0;              // which run of rows they are
};

template <class T>
__device__ ColumnThread column_thread(const Columns& c) {
  const int64_t parts = (c.length + kPart<T> - 1) / kPart<T>, run = global_thread() / parts;
  const int64_t first = run * c.rows_per_thread;
  return {static_cast<int>(global_thread() % parts) * kPart<T>, first, std::min(first + c.rows_per_thread, c.rows),
          run};
}

// Elements [j, j + kPart<T>) of a row of sums.
template <bool kWhole, class T, class A>
__device__ void store_sums(A* row, int j, int length, const A* sums) {
  if constexpr (kWhole) {
    for (int p = 0; p < kPart<T>; p += kPart<A>) {
      Packed<A, kPart<A>> piece;
      for (int k = 0; k < kPart<A>; ++k) piece.v[k] = sums[p + k];
      store(row + j + p, piece);
    }
  } else {
    for (int k = 0; k < kPart<T> && j + k < length; ++k) row[j + k] = sums[k];
  }
}
// The sums of one thread's columns, where those of its run of rows go in (runs, c).
template <bool kWhole, class T, class A>
__device__ void store_parts(A* parts, const ColumnThread& at, const Columns& c, const A* sums) {
  store_sums<kWhole, T>(parts + at.run * c.length, at.j, c.length, sums);
}

inline constexpr int kMostRuns = 32;

// out = the sum of `count` rows of sums: in runs of 32, each in order, and these in order. A block has 32 columns, and
// a warp for each run, at most kMostRuns at a time.
template <class A, class U>
__global__ __launch_bounds__(32 * kMostRuns) void add_parts_kernel(const A* parts, int64_t count, int c, U* out) {
  __shared__ A run[kMostRuns][32];
  const int runs = static_cast<int>(blockDim.x) / 32;
  const int lane = static_cast<int>(threadIdx.x) % 32, own = static_cast<int>(threadIdx.x) / 32;
  const int64_t j = static_cast<int64_t>(blockIdx.x) * 32 + lane;
  A total = 0;
  for (int64_t first = 0; first < count; first += runs * kPartsInRun) {
    const int64_t begin = first + own * kPartsInRun, end = std::min(begin + kPartsInRun, count);
    A sum = 0;
    if (j < c) {
#pragma unroll 8
      for (int64_t i = begin; i < end; ++i) sum += parts[i * c + j];
    }
    run[own][lane] = sum;
    __syncthreads();
    if (own == 0)
      for (int r = 0; r < runs && first + r * kPartsInRun < count; ++r) total += run[r][lane];
    __syncthreads();
  }
  if (own == 0 && j < c) out[j] = converted<U>(total);
}

// The second pass, into `out` (C) of any floating dtype and strides. parts is (count, C) of A.
template <class A>
void add_parts(const char* op, const Tensor& out, const Tensor& parts) {
  const int64_t count = parts.dim(0), c = parts.dim(1);
  Tensor to = out.is_contiguous() ? out : out.make(out.shape());
  with_floating(out.dtype(), op, [&](auto u) {
    using U = decltype(u);
    const auto runs = static_cast<int>(std::clamp<int64_t>(blocks_for(count, kPartsInRun), 1, kMostRuns));
    launch(context(out), op, {.blocks = blocks_for(c, 32), .threads = 32 * runs}, add_parts_kernel<A, U>,
           parts.device_data<A>(), count, static_cast<int>(c), to.device_data<U>());
  });
  if (!out.is_contiguous()) Tensor(out).copy_from(to);
}

// Room for the first pass over `rows` rows.
template <class A>
Tensor parts_for(const Tensor& like, int64_t rows, int64_t c) {
  return like.make({blocks_for(rows, kRowsTogether), c}, kDTypeOf<A>, Category::workspace);
}

}  // namespace tessera::cuda
