// Forward pass of tensor-core attention: 128 queries of a head per block of four warps, 16 to 64 keys at a time.
#include <algorithm>
#include <cstdint>
#include <limits>

#include "tensor/cuda/mma.cuh"
#include "tensor/math.h"
#include "tensor/ops/attention/cuda/tiles.cuh"

namespace tessera::cuda {
namespace {

constexpr int kWarps = 4, kRowTiles = 2, kBlockThreads = 32 * kWarps;
constexpr int kQueries = kWarps * kRowTiles * 16;
// Keys per step: as many as the registers permit.
template <int D, bool kDrops>
constexpr int kKeysOf = D == 64  ? 64
                        : kDrops ? 16
                                 : 32;
constexpr float kNone = -std::numeric_limits<float>::infinity();

// Per row of a lane: the maximum score and the lane's partial sum of exponentials.
struct RowState {
  float max[kRowTiles][2] = {{kNone, kNone}, {kNone, kNone}}, sum[kRowTiles][2] = {};
};

template <int D>
using Out = WarpSums<kRowTiles, D / 8>;
template <int C>
using Scores = WarpSums<kRowTiles, C>;

// One step of the online softmax: scores become exponentials, and earlier sums are rescaled to the new maximum.
// `factor` converts a score to an exponent of two.
template <int D, int C>
__device__ void softmax_step(Scores<C>& scores, RowState& state, Out<D>& out, float factor) {
#pragma unroll
  for (int r = 0; r < kRowTiles; ++r)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float top = state.max[r][half];
#pragma unroll
      for (int c = 0; c < C; ++c) top = fmaxf(top, fmaxf(scores[r][c][2 * half], scores[r][c][2 * half + 1]));
      top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
      top = fmaxf(top, __shfl_xor_sync(~0u, top, 2));
      const float offset = top > kNone ? top * factor : 0.0f;
      // Exactly 1 if the maximum is unchanged, so that subsequent masked keys do not change a row.
      const float shrink = top > kNone ? fast_exp2((state.max[r][half] - top) * factor) : 0.0f;
      state.max[r][half] = top;
      float total = 0;
#pragma unroll
      for (int c = 0; c < C; ++c)
#pragma unroll
        for (int e = 2 * half; e < 2 * half + 2; ++e) {
          scores[r][c][e] = fast_exp2(math::fma(scores[r][c][e], factor, -offset));
          total += scores[r][c][e];
        }
      state.sum[r][half] = math::fma(state.sum[r][half], shrink, total);
#pragma unroll
      for (int c = 0; c < D / 8; ++c) {
        out[r][c][2 * half] *= shrink;
        out[r][c][2 * half + 1] *= shrink;
      }
    }
}

template <int C>
__device__ void drop(Scores<C>& scores, DropoutMaskBits<kRowTiles, C> bits, float up) {
  for_each_sum<kRowTiles, C>(
      [&](int r, int c, int e, int, int) { scores[r][c][e] *= bits >> ((r * C + c) * 4 + e) & 1 ? up : 0.0f; });
}

template <int C>
__device__ void mask(Scores<C>& scores, const AttentionSizes& n, const ScoresPlace& place) {
  for_each_sum<kRowTiles, C>([&](int r, int c, int e, int row, int column) {
    if (!n.sees(place.query0 + row, place.key0 + column)) scores[r][c][e] = kNone;
  });
}
template <int C>
__device__ void mask(Scores<C>& scores, const RowStarts<kRowTiles>& starts, const ScoresPlace& place) {
  for_each_sum<kRowTiles, C>([&](int r, int c, int e, int, int column) {
    if (place.key0 + column < starts.of[r][e / 2]) scores[r][c][e] = kNone;
  });
}

// Divides by the sums; writes the rows from query0 on and their log-sum-exps.
template <int D>
__device__ void finish(const ForwardCall<bfloat16>& call, const TilePlace& at, Out<D>& out, RowState& state,
                       int query0) {
  const AttentionSizes& n = call.sizes;
#pragma unroll
  for (int r = 0; r < kRowTiles; ++r)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float sum = state.sum[r][half];
      sum += __shfl_xor_sync(~0u, sum, 1);
      sum += __shfl_xor_sync(~0u, sum, 2);
      const float inverse = sum == 0 ? 0.0f : 1.0f / sum;  // 0: no visible key
#pragma unroll
      for (int c = 0; c < D / 8; ++c) {
        out[r][c][2 * half] *= inverse;
        out[r][c][2 * half + 1] *= inverse;
      }
      const int query = query0 + 16 * r + 8 * half + lane() / 4;
      if (query < n.tq && lane() % 4 == 0)
        call.lse[n.index(at.b, at.h, query)] = math::fma(state.max[r][half], call.scale, math::log(sum));
    }
  put_rows(call.out, at, out, 1.0f, query0, n.tq);
}

template <int D, bool kDrops, bool kDocuments>
__global__ void __launch_bounds__(kBlockThreads) forward_kernel(ForwardCall<bfloat16> call) {
  using Tile = SharedTile<D>;
  constexpr int kKeys = kKeysOf<D, kDrops>;
  const AttentionSizes& n = call.sizes;
  const uint32_t base = shared_address(dynamic_shared<unsigned char>());
  const Tile query{base};
  const auto key = [&](int step) {
    return Tile{base + static_cast<uint32_t>(Tile::bytes(kQueries) + step % 2 * 2 * Tile::bytes(kKeys))};
  };
  const auto value = [&](int step) { return Tile{key(step).base + Tile::bytes(kKeys)}; };
  const TilePlace at = TilePlace::of_queries(n, count_tiles(n.tq, kQueries), static_cast<int>(blockIdx.x)),
                  keys = at.keys(n);
  const int tile0 = at.tile * kQueries, steps = count_tiles(n.visible_keys(tile0, kQueries), kKeys);
  const auto fetch = [&](int step) {
    copy_rows<D, kBlockThreads>(key(step), call.k, keys, step * kKeys, kKeys, n.tk);
    copy_rows<D, kBlockThreads>(value(step), call.v, keys, step * kKeys, kKeys, n.tk);
    commit_copies();
  };
  // A tile without visible keys still performs one step.
  const int first =
      kDocuments ? std::min(start_bounds(call.starts, at.b, tile0, kQueries).min_start / kKeys, steps - 1) : 0;
  copy_rows<D, kBlockThreads>(query, call.q, at, tile0, kQueries, n.tq);
  fetch(first);

  const int row0 = warp() * kRowTiles * 16;
  const int query0 = tile0 + row0, visible = n.visible_keys(query0, kRowTiles * 16),
            unmasked = n.visible_keys(query0, 1);
  const float factor = call.scale * kLog2E;
  const QueryStarts::Bounds bounds =
      kDocuments ? start_bounds(call.starts, at.b, query0, kRowTiles * 16) : QueryStarts::Bounds{};
  Out<D> out = {};
  RowState state;
  for (int step = first; step < steps; ++step) {
    wait_for_copies<0>();
    __syncthreads();  // all copies have arrived; the other stage is free
    if (step + 1 < steps) fetch(step + 1);
    const int key0 = step * kKeys;
    if (key0 >= visible || (kDocuments && key0 + kKeys <= bounds.min_start)) continue;  // other warps may see more keys
    const ScoresPlace place{query0, key0};
    const auto bits = kDrops ? dropout_mask<kRowTiles, kKeys / 8, false>(call.dropout, at, place) : 0u;
    Scores<kKeys / 8> scores = {};
    multiply_rows(scores, query, row0, key(step));
    if (key0 + kKeys > unmasked) mask<kKeys / 8>(scores, n, place);
    if (kDocuments && key0 < bounds.max_start)  // loaded per step: live values would spill the accumulators
      mask<kKeys / 8>(scores, RowStarts<kRowTiles>(call.starts, at.b, query0), place);
    softmax_step<D, kKeys / 8>(scores, state, out, factor);
    if (kDrops) drop<kKeys / 8>(scores, bits, static_cast<float>(call.dropout.up));
    multiply_weights<D>(out, scores, value(step));
  }
  finish<D>(call, at, out, state, query0);
}

}  // namespace

void tiled_attention(const AttentionProblem& p, const AttentionResult& result) {
  const auto call = forward_call<bfloat16>(p, result);
  with_kind(call, [&](auto size, auto drops, auto documents) {
    constexpr int D = decltype(size)::value;
    constexpr bool kDrops = decltype(drops)::value;
    const Grid grid{.blocks = int64_t{call.sizes.batch} * call.sizes.heads * count_tiles(call.sizes.tq, kQueries),
                    .threads = kBlockThreads,
                    .shared = SharedTile<D>::bytes(kQueries + 4 * kKeysOf<D, kDrops>)};
    launch(context(p.q), "attention", grid, forward_kernel<D, kDrops, decltype(documents)::value>, call);
  });
}

}  // namespace tessera::cuda
