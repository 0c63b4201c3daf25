// Binary tree: few steps with full arrays, for small arrays on many ranks, where latency dominates.
//
//   step 1:  0 <- 1   2 <- 3   4 <- 5   6 <- 7       (8 ranks, counted from the root)
//   step 2:  0 <- 2            4 <- 6
//   step 3:  0 <- 4                                  reversed for a broadcast
//
// Summation order, the same for every element: ((0 + 1) + (2 + 3)) + ((4 + 5) + (6 + 7)), each addition rounded to the
// dtype; if the number of ranks is not a power of two, missing ranks are skipped. Every rank but the root sends its
// array up once; n - 1 arrays are sent down in total.
#include <numeric>

#include "parallel/comm/algorithms.h"
#include "parallel/comm/memory.h"

namespace tessera {

namespace {

constexpr int kTreeTag = -3;

struct Tree {
  Transport& t;
  const Call& call;
  int root;
  int n = t.size();
  int place = (t.rank() - root + n) % n;  // counted from the root
  int64_t bytes = call.bytes();
  int64_t sent = 0;
  Memory memory{call};

  int rank_at(int p) const { return (p + root) % n; }

  // The root's `total` receives the sum; other ranks' `total` is overwritten.
  void reduce(std::byte* total) {
    Scratch other(call, bytes);
    for (int step = 1; step < n; step *= 2) {
      if (place % (2 * step) != 0) {
        memory.send(t, rank_at(place - step), kTreeTag, total, bytes);
        sent += bytes;
        return;
      }
      if (place + step >= n) continue;
      memory.recv(t, rank_at(place + step), kTreeTag, other.data(), bytes);
      memory.reduce_into(total, other.data(), call.count);
    }
  }

  void broadcast(std::byte* data) {
    int step = 1;
    while (step < n && place % (2 * step) == 0) step *= 2;
    if (place != 0) memory.recv(t, rank_at(place - step), kTreeTag, data, bytes);
    for (step /= 2; step > 0; step /= 2) {
      if (place + step >= n) continue;
      memory.send(t, rank_at(place + step), kTreeTag, data, bytes);
      sent += bytes;
    }
  }
};

}  // namespace

int64_t tree(Transport& t, const Call& call) {
  Tree tree{t, call, call.op == Op::all_reduce ? 0 : call.root};
  if (call.op == Op::broadcast) {
    tree.broadcast(call.out);
  } else if (call.op == Op::all_reduce) {
    tree.reduce(call.out);
    tree.broadcast(call.out);
  } else {
    Scratch total(call, tree.bytes);
    tree.memory.copy(total.data(), call.in, tree.bytes);
    tree.reduce(total.data());
    if (tree.place == 0) tree.memory.copy(call.out, total.data(), tree.bytes);
  }
  return tree.sent;
}

// Through a root, as DataParallel and a parameter server do: simple, but the root's link is the bottleneck.
//
//   1 \            / 1
//   2 -> 0 (sum) -> 2        gather, then broadcast
//   3 /            \ 3
//
// Summation order: rank order, in float32, rounded once; bitwise identical to the direct exchange. The root receives
// and sends n - 1 arrays; every other rank sends and receives one.

int64_t root(Transport& t, const Call& call) {
  int64_t sent = 0;
  const auto step = [&](Op op, const std::byte* in, std::byte* out) {
    Call inner = call;
    inner.op = op;
    inner.root = 0;
    inner.in = in;
    inner.out = out;
    sent += exchange(t, inner);
  };
  if (call.op == Op::all_reduce) {
    step(Op::reduce, call.in, call.out);
  } else if (call.op == Op::reduce_scatter) {
    Scratch total(call, t.rank() == 0 ? call.bytes() : 0);
    step(Op::reduce, call.in, total.data());
    step(Op::scatter, total.data(), call.out);
  } else {
    step(Op::gather, call.in, call.out);
  }
  if (call.op != Op::reduce_scatter) step(Op::broadcast, call.out, call.out);
  return sent;
}

namespace {

constexpr int kChunkTag = 7002;

Range split_range(const std::vector<int64_t>& sizes, int r) {
  const int64_t begin = std::accumulate(sizes.begin(), sizes.begin() + r, int64_t{0});
  return {begin, begin + sizes[static_cast<size_t>(r)]};
}

}  // namespace

Range send_range(const Call& call, int ranks, int r) {
  return call.splits ? split_range(call.splits->sent, r) : chunk_range(call.count, ranks, r);
}

Range recv_range(const Call& call, int ranks, int r) {
  return call.splits ? split_range(call.splits->received, r) : chunk_range(call.count, ranks, r);
}

int64_t send_chunks(Transport& t, const Call& call) {
  const int own = t.rank(), ranks = t.size();
  const int64_t element = element_size(call.dtype);
  int64_t sent = 0;
  for (int step = 1; step < ranks; ++step) {
    const int other = (own + step) % ranks;
    const Range there = send_range(call, ranks, other);
    if (there.size() == 0) continue;
    Memory(call).send(t, other, kChunkTag, call.in + there.begin * element, there.size() * element);
    sent += there.size() * element;
  }
  return sent;
}

void receive_chunks(Transport& t, const Call& call) {
  const Memory memory(call);
  const int own = t.rank(), ranks = t.size();
  const int64_t element = element_size(call.dtype);
  const Range here = send_range(call, ranks, own);
  memory.copy(call.out + recv_range(call, ranks, own).begin * element, call.in + here.begin * element,
              here.size() * element);
  for (int step = 1; step < ranks; ++step) {
    const int other = (own + ranks - step) % ranks;
    const Range back = recv_range(call, ranks, other);
    if (back.size() > 0) memory.recv(t, other, kChunkTag, call.out + back.begin * element, back.size() * element);
  }
}

int64_t exchange_uneven(Transport& t, const Call& call) {
  const int64_t sent = send_chunks(t, call);
  receive_chunks(t, call);
  return sent;
}

}  // namespace tessera
