// Tiles of bfloat16 in shared memory, and the sums that a warp makes of two of them with multiply_add().
#pragma once
#include <cstdint>

#include "tensor/cuda/mma.cuh"

namespace tessera::cuda {

// Rows of D numbers in shared memory, from a multiple of a row's size on. Chunks of eight change places within a row by
// the row's number, so that eight rows' chunks of one column lie in different banks. Since c is exchanged by exclusive
// or, the address of chunk c ^ x is that of chunk c exclusive or x * 16.
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

// Sums of R x 16 rows and C x 8 columns, as multiply_add() leaves them in the lanes.
template <int R, int C>
using WarpSums = float[R][C][4];

// Calls f(r, c, e, row, column) for each sum [r][c][e] of a lane; row and column are its place in the warp's sums.
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
