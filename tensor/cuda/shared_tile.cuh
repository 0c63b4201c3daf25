// bfloat16 tiles in shared memory, and warp-level accumulators for multiply_add().
#pragma once
#include <cstdint>

#include "tensor/cuda/mma.cuh"

namespace tessera::cuda {

// Rows of D elements in shared memory, starting at a multiple of the row size. Chunks of eight elements are swizzled by
// the row index, so that chunks of one column in eight rows are in different banks. Because the swizzle is an XOR, the
// address of chunk c ^ x is (the address of chunk c) XOR (16 x).
template <int D>
struct SharedTile {
  uint32_t base;
  static constexpr int kRowBytes = D * 2;
  static constexpr int bytes(int rows) { return rows * kRowBytes; }
  __device__ uint32_t chunk(int row, int c) const {
    return base + static_cast<uint32_t>(row * kRowBytes + (c ^ (row & 7)) * 16);
  }
};

__device__ inline int lane() { return static_cast<int>(threadIdx.x) % 32; }
__device__ inline int warp() { return static_cast<int>(threadIdx.x) / 32; }

// Accumulators of R x 16 rows and C x 8 columns in multiply_add()'s layout.
template <int R, int C>
using WarpSums = float[R][C][4];

// Calls f(r, c, e, row, column) for each accumulator [r][c][e] of a lane; row and column are relative to the warp's
// tile.
template <int R, int C, class F>
__device__ void for_each_sum(const F& f) {
  const int line = lane() / 4, first = lane() % 4 * 2;
#pragma unroll
  for (int r = 0; r < R; ++r)
#pragma unroll
    for (int c = 0; c < C; ++c)
#pragma unroll
      for (int e = 0; e < 4; ++e) f(r, c, e, 16 * r + e / 2 * 8 + line, 8 * c + first + e % 2);
}

}  // namespace tessera::cuda
