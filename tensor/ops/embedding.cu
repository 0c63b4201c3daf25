// GPU embedding. In backward, each block owns some rows of the table: it scans all ids, collects the tokens of its rows
// in order, and accumulates their gradients row by row, each element in one register. Sums are therefore in token order
// without a sort, atomics or workspace. Block b of n owns rows b, b + n, b + 2n, ..., because frequent tokens have
// adjacent ids.
#include <algorithm>
#include <bit>
#include <cstdint>

#include "tensor/cuda/columns.cuh"
#include "tensor/cuda/launch.cuh"
#include "tensor/ops/embedding.h"

namespace tessera::cuda {
namespace {

struct Own {
  int64_t first, count;
  Bounds bounds;  // of ids
};

Own own_rows(const Tensor& table, const VocabShard& s) {
  const int64_t rows = table.dim(0);
  return {s.first, rows,
          context(table).bounds(
              {.op = "embedding", .what = "id", .where = "at position", .limit = s.total > 0 ? s.total : rows})};
}

template <class T>
struct Lookup {
  const T* table;
  const int32_t* ids;
  T* out;
  Own own;

  template <class Position>
  __device__ void operator()(const Position& at) const {
    const int32_t id = ids[at.first];
    const int64_t row = id - own.first;
    typename Position::Elements packed{};
    if (inside(own.bounds, at.first, id) && row >= 0 && row < own.count) packed = at.load(table, row);
    at.store(out, at.first, packed);
  }
};

constexpr int kIdsPerThread = 8, kTile = kThreads * kIdsPerThread;  // ids scanned at a time
constexpr int kTokens = 2 * kTile;                                  // maximum tokens collected before accumulation
constexpr int kMaxRows = 64;                                        // rows of the table per block
constexpr int kLoads = 8;                                           // gradient loads in flight per thread

template <class T>
struct Backward {
  const T* dy;
  const int32_t* ids;
  Accumulate<T>* sums;
  int64_t tokens, vocab;
  int c;
  int shift;  // a block's rows are 2^shift apart
  Own own;

  __device__ int rows() const { return static_cast<int>((vocab - blockIdx.x + (int64_t{1} << shift) - 1) >> shift); }
  __device__ int64_t row(int of_block) const { return (static_cast<int64_t>(of_block) << shift) + blockIdx.x; }
  __device__ bool has(int32_t id) const {
    return id >= 0 && id < vocab && (id & ((1 << shift) - 1)) == static_cast<int>(blockIdx.x);
  }
};

// Collected tokens of the block's rows, in order.
struct BlockTokens {
  int32_t token[kTokens];
  uint8_t row[kTokens];  // of each token, within the block
  int of_warp[kThreads / 32];
  int count;
};

// Exclusive prefix sum of `matches` over the block's threads; `all` receives the total.
__device__ int rank_in_block(BlockTokens& mine, int matches, int& all) {
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  int upto = matches;  // including this lane
  for (int by = 1; by < 32; by *= 2) {
    const int before = __shfl_sync(~0u, upto, lane >= by ? lane - by : lane);
    if (lane >= by) upto += before;
  }
  if (lane == 31) mine.of_warp[warp] = upto;
  __syncthreads();
  int before = upto - matches;
  all = 0;
  for (int w = 0; w < kThreads / 32; ++w) {
    if (w < warp) before += mine.of_warp[w];
    all += mine.of_warp[w];
  }
  return before;
}

// Appends the block's tokens among ids [first, first + kTile) to `mine`. Block 0 checks the ids.
template <class T>
__device__ void collect(const Backward<T>& f, int64_t first, BlockTokens& mine) {
  const int64_t own = first + threadIdx.x * kIdsPerThread;
  int32_t id[kIdsPerThread];
  int matches = 0;
  for (int k = 0; k < kIdsPerThread; ++k) {
    id[k] = own + k < f.tokens ? f.ids[own + k] : -1;
    if (blockIdx.x == 0 && own + k < f.tokens) inside(f.own.bounds, own + k, id[k]);
    id[k] -= static_cast<int32_t>(f.own.first);  // ids before this shard become negative
    if (f.has(id[k])) ++matches;
  }
  int all = 0;
  int at = mine.count + rank_in_block(mine, matches, all);
  for (int k = 0; k < kIdsPerThread; ++k)
    if (f.has(id[k])) {
      mine.token[at] = static_cast<int32_t>(own + k);
      mine.row[at++] = static_cast<uint8_t>(id[k] >> f.shift);
    }
  __syncthreads();
  if (threadIdx.x == 0) mine.count += all;
  __syncthreads();
}

struct RowTokens {
  const BlockTokens& mine;
  int row, window = 0;  // first of the 32 current tokens
  unsigned left;        // bit mask of remaining tokens of the row
  __device__ RowTokens(const BlockTokens& all, int of) : mine(all), row(of), left(matches()) {}
  __device__ unsigned matches() const {
    const int at = window + static_cast<int>(threadIdx.x) % 32;
    return __ballot_sync(~0u, at < mine.count && mine.row[at] == row);
  }
  // Writes and counts the next tokens, at most kLoads; unused entries repeat a token of the row.
  __device__ int next(int32_t (&token)[kLoads]) {
    int found = 0;
#pragma unroll
    for (int l = 0; l < kLoads; ++l) {
      while (left == 0 && window + 32 < mine.count) {
        window += 32;
        left = matches();
      }
      token[l] = left != 0 ? mine.token[window + __ffs(static_cast<int>(left)) - 1] : l > 0 ? token[l - 1] : 0;
      found += left != 0 ? 1 : 0;
      left &= left - 1;
    }
    return found;
  }
};

// Accumulates gradients in token order in a warp's columns of one row. Loads in flight stay packed in words, because
// unpacking would wait for them.
template <class T, bool kVectorized>
__device__ void add_tokens(const Backward<T>& f, const BlockTokens& mine, int row, int j, bool fresh) {
  using A = Accumulate<T>;
  const bool here = j < f.c;
  A* const to = f.sums + f.row(row) * f.c;
  Packed<A, kVecElems<T>> total{};
  if (!fresh && here) each_in_vector<kVectorized, T>(j, f.c, [&](int k) { total.v[k] = to[j + k]; });
  RowTokens tokens(mine, row);
  int32_t token[kLoads];
  while (const int found = tokens.next(token)) {
    uint4 asked[kLoads] = {};
#pragma unroll
    for (int l = 0; l < kLoads; ++l)
      if (here) asked[l] = std::bit_cast<uint4>(load_vector<kVectorized>(f.dy + int64_t{token[l]} * f.c, j, f.c));
    __syncwarp();  // keeps the compiler from sinking the loads to their use
#pragma unroll
    for (int l = 0; l < kLoads; ++l) {
      if (l == found) break;
      const auto g = std::bit_cast<Packed<T, kVecElems<T>>>(asked[l]);
      for (int k = 0; k < kVecElems<T>; ++k) total.v[k] += static_cast<A>(g.v[k]);
    }
  }
  if (here) store_sums<kVectorized, T>(to, j, f.c, total.v);
}

template <class T, bool kVectorized>
__device__ void add_up(const Backward<T>& f, const BlockTokens& mine, bool fresh) {
  constexpr int kStrip = 32 * kVecElems<T>;
  const int units = f.rows() * ((f.c + kStrip - 1) / kStrip), rows = f.rows();
  const int lane = static_cast<int>(threadIdx.x) % 32;
  for (int unit = static_cast<int>(threadIdx.x) / 32; unit < units; unit += kThreads / 32)
    add_tokens<T, kVectorized>(f, mine, unit % rows, unit / rows * kStrip + lane * kVecElems<T>, fresh);
}

template <class T, bool kVectorized>
__global__ __launch_bounds__(kThreads) void embedding_backward_kernel(Backward<T> f) {
  __shared__ BlockTokens mine;
  if (threadIdx.x == 0) mine.count = 0;
  __syncthreads();
  bool fresh = true;
  for (int64_t first = 0; first < f.tokens; first += kTile) {
    collect(f, first, mine);
    if (mine.count + kTile <= kTokens) continue;
    add_up<T, kVectorized>(f, mine, fresh);
    fresh = false;
    __syncthreads();
    if (threadIdx.x == 0) mine.count = 0;
    __syncthreads();
  }
  add_up<T, kVectorized>(f, mine, fresh);
}

}  // namespace

void embedding(const Tensor& out, const Tensor& ids, const Tensor& table, const VocabShard& shard) {
  const int64_t c = table.dim(1), n = ids.numel();
  if (out.numel() == 0) return;
  with_dtype(table.dtype(), [&](auto t) {
    using T = decltype(t);
    const Lookup<T> f{table.device_data<T>(), ids.device_data<int32_t>(), out.device_data<T>(), own_rows(table, shard)};
    for_columns<T>(context(out), "embedding", {n, static_cast<int>(c)}, f, f.table, f.out);
  });
}

void embedding_backward(const Tensor& sums, const Tensor& dy, const Tensor& ids, const VocabShard& shard) {
  constexpr int64_t kBlocks = 1024;  // about the number that a GPU runs concurrently
  const int64_t vocab = sums.dim(0), blocks = std::max(kBlocks, blocks_for(vocab, kMaxRows));
  if (sums.numel() == 0) return;
  with_floating(dy.dtype(), "embedding_backward", [&](auto t) {
    using T = decltype(t);
    using A = Accumulate<T>;
    const Backward<T> f{.dy = dy.device_data<T>(),
                        .ids = ids.device_data<int32_t>(),
                        .sums = sums.device_data<A>(),
                        .tokens = ids.numel(),
                        .vocab = vocab,
                        .c = static_cast<int>(sums.dim(1)),
                        .shift = std::countr_zero(std::bit_ceil(static_cast<uint64_t>(blocks))),
                        .own = own_rows(sums, shard)};
    const bool vectorized = is_vectorizable<T>(f.c, f.dy, f.sums);
    launch(context(dy), "embedding_backward", {.blocks = std::min(vocab, int64_t{1} << f.shift)},
           vectorized ? embedding_backward_kernel<T, true> : embedding_backward_kernel<T, false>, f);
  });
}

}  // namespace tessera::cuda
