// Backward pass of tensor-core attention: one kernel computes dq, iterating over keys; another dk and dv, iterating
// over queries of all heads in the group. Both recompute the probabilities from the log-sum-exp.
//
// The second kernel has transposed scores (keys x queries), so that a lane's accumulators are again left operands of
// the following matmuls.
#include <algorithm>
#include <cstdint>

#include "tensor/cuda/mma.cuh"
#include "tensor/math.h"
#include "tensor/ops/attention/cuda/tiles.cuh"

namespace tessera::cuda {
namespace {

using Call = BackwardCall<bfloat16>;

using Stats = SoftmaxStats<float>;

// Accumulators fill most registers: two of D columns and two of scores.
template <int D>
struct QueryCut {
  static constexpr int kWarps = 4, kRowTiles = 2, kThreads = 32 * kWarps;
  static constexpr int kQueries = kWarps * kRowTiles * 16, kKeys = D == 64 ? 32 : 16;
};
template <int D, bool kDrops, bool kDocuments>
struct KeyCut {
  static constexpr int kWarps = D == 64 ? 4 : 8, kRowTiles = D == 64 ? 2 : 1, kThreads = 32 * kWarps;
  static constexpr int kKeys = kWarps * kRowTiles * 16, kQueries = kDrops || (kDocuments && D == 64) ? 16 : 32;
};

// Two tiles of the kernel's own rows, and two stages of two tiles of the rows over which it iterates.
template <int D, int kOwn, int kOther>
struct FourTiles {
  using Tile = SharedTile<D>;
  uint32_t base;
  static constexpr int kBytes = Tile::bytes(2 * kOwn + 4 * kOther);

  __device__ Tile own(int which) const { return {base + static_cast<uint32_t>(which * Tile::bytes(kOwn))}; }
  __device__ Tile other(int step, int which) const {
    return {base + static_cast<uint32_t>(Tile::bytes(2 * kOwn) + (step % 2 * 2 + which) * Tile::bytes(kOther))};
  }
};

template <int R>
struct Rows {
  Stats of[R][2];
  __device__ explicit Rows(const Stats* stats) {
#pragma unroll
    for (int r = 0; r < R; ++r)
#pragma unroll
      for (int half = 0; half < 2; ++half) of[r][half] = stats[16 * r + 8 * half + lane() / 4];
  }
};

// dp becomes the gradient of the scores (queries x keys).
template <bool kDrops, bool kDocuments, int R, int C>
__device__ void to_gradient(WarpSums<R, C>& dp, const WarpSums<R, C>& scores, const Call& call, const Rows<R>& rows,
                            const RowStarts<R>& starts, const ScoresPlace& place, bool masked,
                            DropoutMaskBits<R, C> bits) {
  const float factor = call.scale * kLog2E;
  const auto up = static_cast<float>(call.dropout.up);
  for_each_sum<R, C>([&](int r, int c, int e, int query, int key) {
    const Stats& stats = rows.of[r][e / 2];
    float p = fast_exp2(math::fma(scores[r][c][e], factor, -stats.lse));
    if (masked && !call.sizes.sees(place.query0 + query, place.key0 + key)) p = 0;
    if (kDocuments && place.key0 + key < starts.of[r][e / 2]) p = 0;
    if (kDrops) dp[r][c][e] *= bits >> ((r * C + c) * 4 + e) & 1 ? up : 0.0f;
    dp[r][c][e] = p * (dp[r][c][e] - stats.delta);
  });
}

template <int D, bool kDrops, bool kDocuments>
__global__ void __launch_bounds__(QueryCut<D>::kThreads) query_gradient_kernel(Call call) {
  using Cut = QueryCut<D>;
  constexpr int kThreads = Cut::kThreads, kKeys = Cut::kKeys, kR = Cut::kRowTiles;
  const AttentionSizes& n = call.sizes;
  const FourTiles<D, Cut::kQueries, kKeys> tiles{shared_address(dynamic_shared<unsigned char>())};
  const TilePlace at = TilePlace::of_queries(n, count_tiles(n.tq, Cut::kQueries), static_cast<int>(blockIdx.x)),
                  keys = at.keys(n);
  const int tile0 = at.tile * Cut::kQueries, steps = count_tiles(n.visible_keys(tile0, Cut::kQueries), kKeys);
  const auto fetch = [&](int step) {
    copy_rows<D, kThreads>(tiles.other(step, 0), call.k, keys, step * kKeys, kKeys, n.tk);
    copy_rows<D, kThreads>(tiles.other(step, 1), call.v, keys, step * kKeys, kKeys, n.tk);
    commit_copies();
  };
  const int first =
      kDocuments ? std::min(start_bounds(call.starts, at.b, tile0, Cut::kQueries).min_start / kKeys, steps - 1) : 0;
  copy_rows<D, kThreads>(tiles.own(0), call.q, at, tile0, Cut::kQueries, n.tq);
  copy_rows<D, kThreads>(tiles.own(1), call.dout, at, tile0, Cut::kQueries, n.tq);
  fetch(first);

  const int row0 = warp() * kR * 16;
  const int query0 = tile0 + row0, visible = n.visible_keys(query0, kR * 16), unmasked = n.visible_keys(query0, 1);
  const Rows<kR> rows(call.stats.at(n, at.b, at.h, query0));
  const RowStarts<kR> starts(kDocuments ? call.starts : QueryStarts{}, at.b, query0);
  const int min_start = kDocuments ? start_bounds(call.starts, at.b, query0, kR * 16).min_start : 0;
  WarpSums<kR, D / 8> dq = {};
  for (int step = first; step < steps; ++step) {
    wait_for_copies<0>();
    __syncthreads();
    if (step + 1 < steps) fetch(step + 1);
    const int key0 = step * kKeys;
    if (key0 >= visible || (kDocuments && key0 + kKeys <= min_start)) continue;
    const ScoresPlace place{query0, key0};
    const auto bits = kDrops ? dropout_mask<kR, kKeys / 8, false>(call.dropout, at, place) : 0u;
    WarpSums<kR, kKeys / 8> scores = {}, dp = {};
    multiply_rows(scores, tiles.own(0), row0, tiles.other(step, 0));
    multiply_rows(dp, tiles.own(1), row0, tiles.other(step, 1));
    to_gradient<kDrops, kDocuments>(dp, scores, call, rows, starts, place, key0 + kKeys > unmasked, bits);
    multiply_weights<D>(dq, dp, tiles.other(step, 0));
  }
  put_rows(call.dq, at, dq, call.scale, query0, n.tq);
}

template <int R, int C>
__device__ void to_probabilities(WarpSums<R, C>& scores, const Call& call, const Stats* stats, const ScoresPlace& place,
                                 bool masked) {
  const float factor = call.scale * kLog2E;
  for_each_sum<R, C>([&](int r, int c, int e, int key, int query) {
    float& x = scores[r][c][e];
    x = fast_exp2(math::fma(x, factor, -stats[query].lse));
    if (masked && !call.sizes.sees(place.query0 + query, place.key0 + key)) x = 0;
  });
}

// Zeroes the probabilities (keys x queries) of keys before the queries' starts.
template <int R, int C>
__device__ void hide_before(WarpSums<R, C>& probabilities, const QueryStarts& starts, int b, const ScoresPlace& place) {
  for_each_sum<R, C>([&](int r, int c, int e, int key, int query) {
    if (place.key0 + key < starts.of(b, place.query0 + query)) probabilities[r][c][e] = 0;
  });
}

// to = from * mask; `to` may be `from`.
template <int R, int C>
__device__ void drop(WarpSums<R, C>& to, const WarpSums<R, C>& from, DropoutMaskBits<R, C> bits, float up) {
  for_each_sum<R, C>([&](int r, int c, int e, int, int) {
    to[r][c][e] = from[r][c][e] * (bits >> ((r * C + c) * 4 + e) & 1 ? up : 0.0f);
  });
}

template <int D, bool kDrops, bool kDocuments>
__global__ void __launch_bounds__(KeyCut<D, kDrops, kDocuments>::kThreads) key_gradient_kernel(Call call) {
  using Cut = KeyCut<D, kDrops, kDocuments>;
  constexpr int kThreads = Cut::kThreads, kQueries = Cut::kQueries, kR = Cut::kRowTiles;
  const AttentionSizes& n = call.sizes;
  const FourTiles<D, Cut::kKeys, kQueries> tiles{shared_address(dynamic_shared<unsigned char>())};
  auto* const of_stages = reinterpret_cast<Stats*>(dynamic_shared<unsigned char>() + tiles.kBytes);
  const TilePlace keys = TilePlace::of_keys(n, count_tiles(n.tk, Cut::kKeys), static_cast<int>(blockIdx.x));
  const int tile0 = keys.tile * Cut::kKeys, first = n.first_query(tile0) / kQueries;
  const int t = static_cast<int>(threadIdx.x);
  // A tile of keys that no query sees still performs one step.
  const int past =
      kDocuments ? std::max(last_query(call.starts, keys.b, tile0 + Cut::kKeys), first * kQueries + 1) : n.tq;
  copy_rows<D, kThreads>(tiles.own(0), call.k, keys, tile0, Cut::kKeys, n.tk);
  copy_rows<D, kThreads>(tiles.own(1), call.v, keys, tile0, Cut::kKeys, n.tk);

  const int row0 = warp() * kR * 16;
  const int key0 = tile0 + row0;
  const auto up = static_cast<float>(call.dropout.up);
  WarpSums<kR, D / 8> dk = {}, dv = {};
  for (int member = 0; member < n.group; ++member) {
    const TilePlace at = keys.queries(n, member);
    const auto fetch = [&](int step) {
      copy_rows<D, kThreads>(tiles.other(step, 0), call.q, at, step * kQueries, kQueries, n.tq);
      copy_rows<D, kThreads>(tiles.other(step, 1), call.dout, at, step * kQueries, kQueries, n.tq);
      if (t < kQueries / 2)  // 16 bytes hold two statistics
        copy_async(shared_address(of_stages + step % 2 * kQueries + 2 * t),
                   call.stats.at(n, at.b, at.h, step * kQueries + 2 * t), true);
      commit_copies();
    };
    if (member > 0) __syncthreads();  // the stages are free
    fetch(first);
    for (int step = first; step * kQueries < past; ++step) {
      wait_for_copies<0>();
      __syncthreads();
      if ((step + 1) * kQueries < past) fetch(step + 1);
      const int query0 = step * kQueries;
      if (n.visible_keys(query0, kQueries) <= key0) continue;  // no query of the step sees a key of this warp
      const ScoresPlace place{query0, key0};
      const auto bits = kDrops ? dropout_mask<kR, kQueries / 8, true>(call.dropout, at, place) : 0u;
      const Stats* const here = of_stages + step % 2 * kQueries;
      WarpSums<kR, kQueries / 8> p = {}, dp = {};
      multiply_rows(p, tiles.own(0), row0, tiles.other(step, 0));
      to_probabilities(p, call, here, place, n.visible_keys(query0, 1) < key0 + kR * 16);
      if (kDocuments && start_bounds(call.starts, keys.b, query0, kQueries).max_start > key0)
        hide_before(p, call.starts, keys.b, place);
      if (kDrops) {  // dp serves as scratch
        drop(dp, p, bits, up);
        multiply_weights<D>(dv, dp, tiles.other(step, 1));
        for_each_sum<kR, kQueries / 8>([&](int r, int c, int e, int, int) { dp[r][c][e] = 0; });
      } else {
        multiply_weights<D>(dv, p, tiles.other(step, 1));
      }
      multiply_rows(dp, tiles.own(1), row0, tiles.other(step, 1));
      if (kDrops) drop(dp, dp, bits, up);
      for_each_sum<kR, kQueries / 8>(
          [&](int r, int c, int e, int, int query) { dp[r][c][e] = p[r][c][e] * (dp[r][c][e] - here[query].delta); });
      multiply_weights<D>(dk, dp, tiles.other(step, 0));
    }
  }
  put_rows(call.dk, keys, dk, call.scale, key0, n.tk);
  put_rows(call.dv, keys, dv, 1.0f, key0, n.tk);
}

}  // namespace

void tiled_attention_backward(const BackwardProblem& p) {
  const auto call = backward_call<bfloat16>(p);
  with_kind(call, [&](auto size, auto drops, auto documents) {
    constexpr int D = decltype(size)::value;
    constexpr bool kDrops = decltype(drops)::value, kDocuments = decltype(documents)::value;
    using Queries = QueryCut<D>;
    using Keys = KeyCut<D, kDrops, kDocuments>;
    static_assert(kQueryPadding % Queries::kQueries == 0 && kQueryPadding % Keys::kQueries == 0);
    const int64_t batch = call.sizes.batch;
    const Grid of_queries{.blocks = batch * call.sizes.heads * count_tiles(call.sizes.tq, Queries::kQueries),
                          .threads = Queries::kThreads,
                          .shared = FourTiles<D, Queries::kQueries, Queries::kKeys>::kBytes};
    const Grid of_keys{.blocks = batch * call.sizes.key_heads * count_tiles(call.sizes.tk, Keys::kKeys),
                       .threads = Keys::kThreads,
                       .shared = FourTiles<D, Keys::kKeys, Keys::kQueries>::kBytes +
                                 2 * Keys::kQueries * static_cast<int>(sizeof(Stats))};
    Context& c = context(p.of.q);
    launch(c, "attention_backward", of_queries, query_gradient_kernel<D, kDrops, kDocuments>, call);
    launch(c, "attention_backward", of_keys, key_gradient_kernel<D, kDrops, kDocuments>, call);
  });
}

}  // namespace tessera::cuda
