// Binary tree: few steps with full arrays, for small arrays on many ranks, where latency dominates.
//
//   step 1:  0 <- 1   2 <- 3   4 <- 5   6 <- 7       (8 ranks, counted from the root)
//   step 2:  0 <- 2            4 <- 6
//   step 3:  0 <- 4                                  reversed for a broadcast
//
// Summation order, the same for every element: ((0 + 1) + (2 + 3)) + ((4 + 5) + (6 + 7)), each addition rounded to the
// dtype; if the number of ranks is not a power of two, missing ranks are skipped. Every rank but the root sends its
// array up once; n - 1 arrays are sent down in total.
#include <cstdint>

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

}  // namespace tessera
