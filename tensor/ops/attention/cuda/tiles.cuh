// Steps of tensor-core attention (after Dao 2023, "FlashAttention-2").
//
// A warp multiplies R x 16 rows of a block's tile with the rows of another tile (scores), and the result with the
// columns of a third: accumulators of the first matmul, packed as pairs, are the left operand of the second, so
// probabilities never leave the registers.
#pragma once
#include <cstdint>
#include <type_traits>

#include "tensor/cuda/shared_tile.cuh"
#include "tensor/ops/attention/cuda/attention.cuh"

namespace tessera::cuda {

// Starts the copy of `count` rows from row0 on, zero-padded.
template <int D, int kBlockThreads>
__device__ void copy_rows(SharedTile<D> to, const HeadRows<const bfloat16>& from, const TilePlace& at, int row0,
                          int count, int rows) {
  constexpr int kChunks = D / 8, kAtOnce = kBlockThreads / kChunks;
  int t = static_cast<int>(threadIdx.x);
  asm volatile("" : "+r"(t));  // recompute addresses: live addresses would spill the accumulators
  const int c = t % kChunks;
  const bfloat16* const head = from.at(at.b, at.h, 0) + c * 8;
  for (int row = t / kChunks; row < count; row += kAtOnce) {
    const bool valid = row0 + row < rows;
    copy_async(to.chunk(row, c), head + (valid ? (row0 + row) * from.row : 0), valid);
  }
}

// sums += L R^T over D, with the rows of `left` from row0 on as L and the rows of `right` from 0 on as R.
template <int D, int R, int C>
__device__ void multiply_rows(WarpSums<R, C>& sums, SharedTile<D> left, int row0, SharedTile<D> right) {
  const int l = lane();
  const uint32_t left0 = left.chunk(row0 + l % 16, l / 16), right0 = right.chunk(l / 16 * 8 + l % 8, l / 8 % 2);
#pragma unroll
  for (int k = 0; k < D / 16; ++k) {
    const uint32_t from_left = left0 ^ (k * 32u), from_right = right0 ^ (k * 32u);  // chunk 2 k and the next
    uint32_t a[R][4];
#pragma unroll
    for (int r = 0; r < R; ++r) load_matrices(a[r], from_left + left.bytes(16 * r));
#pragma unroll
    for (int c = 0; c < C; c += 2) {
      uint32_t b[4];
      load_matrices(b, from_right + right.bytes(8 * c));
#pragma unroll
      for (int r = 0; r < R; ++r) {
        multiply_add(sums[r][c], a[r], b[0], b[1]);
        multiply_add(sums[r][c + 1], a[r], b[2], b[3]);
      }
    }
  }
}

// sums += weights (R x 16 rows, C x 8 columns) times the first C x 8 rows of `right`.
template <int D, int R, int C>
__device__ void multiply_weights(WarpSums<R, D / 8>& sums, const WarpSums<R, C>& weights, SharedTile<D> right) {
  const int l = lane();
  const uint32_t right0 = right.chunk(l % 16, l / 16);
#pragma unroll
  for (int k = 0; k < C; k += 2) {
    uint32_t a[R][4];
#pragma unroll
    for (int r = 0; r < R; ++r) {
      const float(&w)[C][4] = weights[r];
      a[r][0] = pack_pair(w[k][0], w[k][1]);
      a[r][1] = pack_pair(w[k][2], w[k][3]);
      a[r][2] = pack_pair(w[k + 1][0], w[k + 1][1]);
      a[r][3] = pack_pair(w[k + 1][2], w[k + 1][3]);
    }
#pragma unroll
    for (int c = 0; c < D / 8; c += 2) {
      uint32_t b[4];
      load_transposed(b, (right0 ^ (c * 16u)) + right.bytes(8 * k));
#pragma unroll
      for (int r = 0; r < R; ++r) {
        multiply_add(sums[r][c], a[r], b[0], b[1]);
        multiply_add(sums[r][c + 1], a[r], b[2], b[3]);
      }
    }
  }
}

template <int R>
struct RowStarts {
  int of[R][2];
  __device__ RowStarts(const QueryStarts& starts, int b, int query0) {
#pragma unroll
    for (int r = 0; r < R; ++r)
#pragma unroll
      for (int half = 0; half < 2; ++half) of[r][half] = starts.of(b, query0 + 16 * r + 8 * half + lane() / 4);
  }
};

struct ScoresPlace {
  int query0, key0;
};

// Bit (r * C + c) * 4 + e is set if sum [r][c][e] survives dropout. Processes elements one by one to save registers.
template <int R, int C>
using DropoutMaskBits = std::conditional_t<R * C * 4 <= 32, uint32_t, uint64_t>;
template <int R, int C, bool kKeysDown>
__device__ DropoutMaskBits<R, C> dropout_mask(const AttentionDropout& dropout, const TilePlace& at,
                                              const ScoresPlace& place) {
  static_assert(R * C * 4 <= 64);
  const int line = lane() / 4, first = lane() % 4 * 2;
  const auto tokens = static_cast<int64_t>(dropout.tokens);
  DropoutRow row = dropout_row(dropout, at.b, at.h, place.query0);
  DropoutMaskBits<R, C> bits = 0;
#pragma unroll 1
  for (int i = 0; i < R * C * 4; ++i) {
    const int e = i % 2, c = i / 2 % C, half = i / (2 * C) % 2, r = i / (4 * C);
    const int down = 16 * r + 8 * half + line, across = 8 * c + first + e;
    const int query = kKeysDown ? across : down, key = place.key0 + (kKeysDown ? down : across);
    bits |= static_cast<DropoutMaskBits<R, C>>(row.keeps(query * tokens + key)) << ((r * C + c) * 4 + 2 * half + e);
  }
  return bits;
}

__device__ inline void put_pair(const Result<bfloat16>& to, int64_t at, float first, float second) {
  if (to.wide)
    *reinterpret_cast<float2*>(to.wide + at) = float2{first, second};
  else
    *reinterpret_cast<uint32_t*>(to.narrow + at) = pack_pair(first, second);
}

// Writes the sums times `factor` to rows from row0 on.
template <int R, int C>
__device__ void put_rows(const Result<bfloat16>& to, const TilePlace& at, const WarpSums<R, C>& sums, float factor,
                         int row0, int rows) {
#pragma unroll
  for (int r = 0; r < R; ++r)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = row0 + 16 * r + 8 * half + lane() / 4;
      if (row >= rows) continue;
      const int64_t line = to.at(at.b, at.h, row) + lane() % 4 * 2;
#pragma unroll
      for (int c = 0; c < C; ++c)
        put_pair(to, line + 8 * c, sums[r][c][2 * half] * factor, sums[r][c][2 * half + 1] * factor);
    }
}

// Calls f with the head dim, dropout and document starts as compile-time constants.
template <class Call, class F>
void with_kind(const Call& call, const F& f) {
  const auto either = [](bool is, const auto& g) { is ? g(std::true_type{}) : g(std::false_type{}); };
  either(call.sizes.d == 64, [&](auto small) {
    either(call.dropout.any, [&](auto drops) {
      either(call.starts.any(), [&](auto documents) {
        f(std::integral_constant < int, decltype(small)::value ? 64 : 128 > {}, drops, documents);
      });
    });
  });
}

}  // namespace tessera::cuda
