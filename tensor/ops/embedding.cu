// Lookup by rows on a GPU. Backward, each block has some rows of the table: it walks all ids, keeps the tokens that are
// its own in the order in which they come, and adds up their gradients row by row, each element in one register. So
// every sum is in token order without a sort, atomics or workspace.
#include "tensor/cuda/columns.cuh"
#include "tensor/cuda/embedding.h"
#include "tensor/cuda/indices.cuh"

namespace tessera::cuda {
namespace {

// Rows [first, first + count) of a whole table.
struct Own {
  int64_t first, count;
  Bounds bounds;  // of ids
};

Own own_rows(const Tensor& table, const VocabPart& part) {
  const int64_t rows = table.dim(0);
  return {part.first, rows,
          context(table).bounds(
              {.op = "embedding", .what = "id", .where = "at position", .limit = part.whole > 0 ? part.whole : rows})};
}

template <class T, bool kWhole>
__global__ void embedding_kernel(const T* table, const int32_t* ids, T* out, Columns tokens, Own own) {
  const ColumnThread at = column_thread<T>(tokens);
  if (at.first >= tokens.rows) return;
  const int64_t c = tokens.length;
  const int32_t id = ids[at.first];
  const int64_t row = id - own.first;
  Packed<T, kPart<T>> part{};
  if (inside(own.bounds, at.first, id) && row >= 0 && row < own.count)
    part = load_part<kWhole>(table + row * c, at.j, tokens.length);
  store_part<kWhole>(out + at.first * c, at.j, tokens.length, part);
}

constexpr int kIdsPerThread = 8, kTile = kThreads * kIdsPerThread;  // ids that a block looks at together
constexpr int kTokens = 2 * kTile;                                  // that a block keeps at most before it adds them up
constexpr int kMostRows = 64;                                       // of the table, for a block
constexpr int kLoads = 8;                                           // gradients on their way to a thread

template <class T>
struct Backward {
  const T* dy;
  const int32_t* ids;
  Accumulate<T>* sums;
  int64_t tokens, vocab;
  int c;
  int rows;  // of the table, for a block
  Own own;
};

// Tokens of the block's rows, in order.
struct Mine {
  int32_t token[kTokens];
  uint8_t row[kTokens];  // less the block's first
  int of_warp[kThreads / 32];
  int count;
};

// How many matches the threads before this one have, and in `all` how many there are.
__device__ int place_of(Mine& mine, int matches, int& all) {
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  int upto = matches;  // of this warp's lanes up to this one
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

// Adds the block's tokens among ids [first, first + kTile) to `mine`. Block 0 checks the ids.
template <class T>
__device__ void collect(const Backward<T>& f, int64_t first, Mine& mine) {
  const int64_t begin = static_cast<int64_t>(blockIdx.x) * f.rows, own = first + threadIdx.x * kIdsPerThread;
  const int64_t rows = std::min<int64_t>(f.rows, f.vocab - begin);
  int32_t id[kIdsPerThread];
  int matches = 0;
  for (int k = 0; k < kIdsPerThread; ++k) {
    id[k] = own + k < f.tokens ? f.ids[own + k] : -1;
    if (blockIdx.x == 0 && own + k < f.tokens) inside(f.own.bounds, own + k, id[k]);
    id[k] -= static_cast<int32_t>(f.own.first);  // of a part, ids before it are below zero
    if (id[k] >= begin && id[k] < begin + rows) ++matches;
  }
  int all = 0;
  int at = mine.count + place_of(mine, matches, all);
  for (int k = 0; k < kIdsPerThread; ++k)
    if (id[k] >= begin && id[k] < begin + rows) {
      mine.token[at] = static_cast<int32_t>(own + k);
      mine.row[at++] = static_cast<uint8_t>(id[k] - begin);
    }
  __syncthreads();
  if (threadIdx.x == 0) mine.count += all;
  __syncthreads();
}

// A warp's columns of one row: the sum so far, and the next gradients in token order.
template <class T, bool kWhole>
__device__ void add_tokens(const Backward<T>& f, const Mine& mine, int row, int j, bool fresh) {
  using A = Accumulate<T>;
  const int lane = static_cast<int>(threadIdx.x) % 32, count = mine.count;
  const bool here = j < f.c;
  A* const to = f.sums + (static_cast<int64_t>(blockIdx.x) * f.rows + row) * f.c;
  Packed<A, kPart<T>> total{};
  if (!fresh && here) each_in_part<kWhole, T>(j, f.c, [&](int k) { total.v[k] = to[j + k]; });
  for (int first = 0; first < count; first += 32) {
    unsigned next = __ballot_sync(~0u, first + lane < count && mine.row[first + lane] == row);
    while (next != 0) {
      Packed<T, kPart<T>> g[kLoads] = {};
      const unsigned these = next;
#pragma unroll
      for (int l = 0; l < kLoads; ++l) {
        if (next == 0) break;
        const int64_t token = mine.token[first + __ffs(static_cast<int>(next)) - 1];
        next &= next - 1;
        if (here) g[l] = load_part<kWhole>(f.dy + token * f.c, j, f.c);
      }
      const int loaded = __popc(these) - __popc(next);
#pragma unroll
      for (int l = 0; l < kLoads; ++l)
        if (l < loaded)
          for (int k = 0; k < kPart<T>; ++k) total.v[k] += static_cast<A>(g[l].v[k]);
    }
  }
  if (here) store_sums<kWhole, T>(to, j, f.c, total.v);
}

// Each warp has the columns of some strips of some rows.
template <class T, bool kWhole>
__device__ void add_up(const Backward<T>& f, const Mine& mine, bool fresh) {
  constexpr int kStrip = 32 * kPart<T>;
  const int64_t begin = static_cast<int64_t>(blockIdx.x) * f.rows;
  const int rows = static_cast<int>(std::min<int64_t>(f.rows, f.vocab - begin)), strips = (f.c + kStrip - 1) / kStrip;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  for (int unit = static_cast<int>(threadIdx.x) / 32; unit < rows * strips; unit += kThreads / 32)
    add_tokens<T, kWhole>(f, mine, unit / strips, unit % strips * kStrip + lane * kPart<T>, fresh);
}

template <class T, bool kWhole>
__global__ __launch_bounds__(kThreads) void embedding_backward_kernel(Backward<T> f) {
  __shared__ Mine mine;
  if (threadIdx.x == 0) mine.count = 0;
  __syncthreads();
  bool fresh = true;
  for (int64_t first = 0; first < f.tokens; first += kTile) {
    collect(f, first, mine);
    if (mine.count + kTile <= kTokens) continue;
    add_up<T, kWhole>(f, mine, fresh);
    fresh = false;
    __syncthreads();
    if (threadIdx.x == 0) mine.count = 0;
    __syncthreads();
  }
  add_up<T, kWhole>(f, mine, fresh);
}

}  // namespace

void embedding(const Tensor& out, const Tensor& ids, const Tensor& table, const VocabPart& part) {
  const int64_t c = table.dim(1), n = ids.numel();
  if (out.numel() == 0) return;
  with_dtype(table.dtype(), [&](auto t) {
    using T = decltype(t);
    const T* const from = table.device_data<T>();
    T* const to = out.device_data<T>();
    const Columns at{n, static_cast<int>(c)};
    const auto queue = [&](auto whole) {
      launch(context(out), "embedding", at.template grid<T>(), embedding_kernel<T, decltype(whole)::value>, from,
             ids.device_data<int32_t>(), to, at, own_rows(table, part));
    };
    with_parts<T>(c, queue, from, to);
  });
}

void embedding_backward(const Tensor& sums, const Tensor& dy, const Tensor& ids, const VocabPart& part) {
  constexpr int64_t kBlocks = 1024;  // about as many as a GPU runs at once
  const int64_t vocab = sums.dim(0), rows = std::clamp<int64_t>(blocks_for(vocab, kBlocks), 1, kMostRows);
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
                        .rows = static_cast<int>(rows),
                        .own = own_rows(sums, part)};
    const auto queue = [&](auto whole) {
      launch(context(dy), "embedding_backward", {.blocks = blocks_for(vocab, rows)},
             embedding_backward_kernel<T, decltype(whole)::value>, f);
    };
    with_parts<T>(f.c, queue, f.dy, f.sums);
  });
}

}  // namespace tessera::cuda
