// Plain attention: every dtype, every size of a head, rows that begin anywhere.
#include "tensor/cuda/shared.cuh"
#include "tensor/ops/attention/cuda/plain.cuh"

namespace tessera::cuda {
namespace {

// Where the first tile of keys begins in which some of a tile's queries sees one.
__device__ int first_tile(const QueryStarts& starts, const TilePlace& at) {
  return starts.among(at.b, at.tile * kTile, kTile).least / kTile * kTile;
}

// One block for 64 queries of a head and 64 of its columns.
template <class T>
__global__ void __launch_bounds__(kThreads) forward_kernel(ForwardCall<T> call) {
  using A = Accumulate<T>;
  auto& s = *dynamic_shared<PlainShared<A>>();
  const AttentionSizes& n = call.sizes;
  const int columns = tiles_of(n.d, kTile), block = static_cast<int>(blockIdx.x), column0 = block % columns * kTile;
  const TilePlace at = TilePlace::of_queries(n, tiles_of(n.tq, kTile), block / columns), keys = at.keys(n);
  const int query0 = at.tile * kTile, seen = n.keys_seen(query0, kTile);
  const int mine = query0 + OnlineSoftmax<T>::row();
  OnlineSoftmax<T> softmax;
  Sums<A> out = {};
  for (int key0 = first_tile(call.starts, at); key0 < seen; key0 += kTile) {
    Sums<A> scores = {};
    add_product<A>(scores, s, along(call.q.at(at.b, at.h, query0), call.q.row, n.tq - query0, n.d, call.scale),
                   along(call.k.at(keys.b, keys.h, key0), call.k.row, n.tk - key0, n.d));
    for (int r = 0; r < kMicro; ++r) {
      const int i = query0 + first_row() + r, start = call.starts.of(at.b, i);
      for (int c = 0; c < kMicro; ++c) {
        const int j = key0 + first_column() + c;
        s.p[first_row() + r][first_column() + c] =
            j >= start && n.sees(i, j) ? scores[r][c] : -std::numeric_limits<A>::infinity();
      }
    }
    __syncthreads();
    softmax.step(s, call.dropout, call.dropout.row(at.b, at.h, mine), key0);
    __syncthreads();
    for (int r = 0; r < kMicro; ++r)
      for (int c = 0; c < kMicro; ++c) out[r][c] *= s.of_row[first_row() + r];
    add_product<A>(out, s, Factor<A>{s.p[0], 1, kTile + 1, kTile, kTile},
                   across(call.v.at(keys.b, keys.h, key0) + column0, call.v.row, n.tk - key0, n.d - column0));
  }
  __syncthreads();
  if (softmax.first_key() == 0) {
    s.of_row[softmax.row()] = softmax.sum == 0 ? A(0) : A(1) / softmax.sum;  // 0: it sees no key
    if (column0 == 0 && mine < n.tq) call.lse[n.index(at.b, at.h, mine)] = softmax.max + math::log(softmax.sum);
  }
  __syncthreads();
  for (int r = 0; r < kMicro; ++r)
    for (int c = 0; c < kMicro; ++c) out[r][c] *= s.of_row[first_row() + r];
  put_sums<T>(call.out, at, out, query0, n.tq, column0, n.d);
}

// One block for 64 queries of a head and 64 columns of their gradient.
template <class T>
__global__ void __launch_bounds__(kThreads) query_gradient_kernel(BackwardCall<T> call) {
  using A = Accumulate<T>;
  auto& s = *dynamic_shared<PlainShared<A>>();
  const AttentionSizes& n = call.sizes;
  const int columns = tiles_of(n.d, kTile), block = static_cast<int>(blockIdx.x), column0 = block % columns * kTile;
  const TilePlace at = TilePlace::of_queries(n, tiles_of(n.tq, kTile), block / columns), keys = at.keys(n);
  const int query0 = at.tile * kTile, seen = n.keys_seen(query0, kTile);
  Sums<A> dq = {};
  for (int key0 = first_tile(call.starts, at); key0 < seen; key0 += kTile) {
    gradient_tile(s, call, at, keys, query0, key0);
    add_product<A>(dq, s, Factor<A>{s.ds[0], 1, kTile + 1, kTile, kTile},
                   across(call.k.at(keys.b, keys.h, key0) + column0, call.k.row, n.tk - key0, n.d - column0));
  }
  for (int r = 0; r < kMicro; ++r)
    for (int c = 0; c < kMicro; ++c) dq[r][c] *= call.scale;
  put_sums<T>(call.dq, at, dq, query0, n.tq, column0, n.d);
}

// One block for 64 keys of a head and 64 columns of the gradients of keys and values: what the heads of queries that
// see them bring, in the order of heads.
template <class T>
__global__ void __launch_bounds__(kThreads) key_gradient_kernel(BackwardCall<T> call) {
  using A = Accumulate<T>;
  auto& s = *dynamic_shared<PlainShared<A>>();
  const AttentionSizes& n = call.sizes;
  const int columns = tiles_of(n.d, kTile), block = static_cast<int>(blockIdx.x), column0 = block % columns * kTile;
  const TilePlace keys = TilePlace::of_keys(n, tiles_of(n.tk, kTile), block / columns);
  const int key0 = keys.tile * kTile, d = n.d - column0;
  const int past = call.starts.last_query(keys.b, key0 + kTile);
  Sums<A> dk = {}, dv = {};
  for (int member = 0; member < n.group; ++member) {
    const TilePlace at = keys.queries(n, member);
    for (int query0 = n.first_query(key0) / kTile * kTile; query0 < past; query0 += kTile) {
      gradient_tile(s, call, at, keys, query0, key0);
      const int queries = n.tq - query0;
      add_product<A>(dv, s, Factor<A>{s.p[0], kTile + 1, 1, kTile, kTile},
                     across(call.dout.at(at.b, at.h, query0) + column0, call.dout.row, queries, d));
      add_product<A>(dk, s, Factor<A>{s.ds[0], kTile + 1, 1, kTile, kTile},
                     across(call.q.at(at.b, at.h, query0) + column0, call.q.row, queries, d, call.scale));
    }
  }
  put_sums<T>(call.dk, keys, dk, key0, n.tk, column0, n.d);
  put_sums<T>(call.dv, keys, dv, key0, n.tk, column0, n.d);
}

template <class T>
Grid grid_of(const AttentionSizes& n, int heads, int rows) {
  return {.blocks = int64_t{n.batch} * heads * tiles_of(rows, kTile) * tiles_of(n.d, kTile),
          .shared = static_cast<int>(sizeof(PlainShared<Accumulate<T>>))};
}

}  // namespace

void plain_attention(const AttentionProblem& p, const Attended& result) {
  with_floating(p.q.dtype(), "attention", [&](auto t) {
    using T = decltype(t);
    const auto call = forward_call<T>(p, result);
    launch(context(p.q), "attention", grid_of<T>(call.sizes, call.sizes.heads, call.sizes.tq), forward_kernel<T>, call);
  });
}

void plain_attention_backward(const BackwardProblem& p) {
  with_floating(p.of.q.dtype(), "attention_backward", [&](auto t) {
    using T = decltype(t);
    const auto call = backward_call<T>(p);
    Context& c = context(p.of.q);
    launch(c, "attention_backward", grid_of<T>(call.sizes, call.sizes.heads, call.sizes.tq), query_gradient_kernel<T>,
           call);
    launch(c, "attention_backward", grid_of<T>(call.sizes, call.sizes.key_heads, call.sizes.tk), key_gradient_kernel<T>,
           call);
  });
}

}  // namespace tessera::cuda
