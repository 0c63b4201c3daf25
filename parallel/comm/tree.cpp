// A binary tree: few steps, whole arrays. For small arrays on many ranks, where latency is what counts.
//
//   step 1:  0 <- 1   2 <- 3   4 <- 5   6 <- 7       (8 ranks, counted from the root)
//   step 2:  0 <- 2            4 <- 6
//   step 3:  0 <- 4                                  and back the same way for a broadcast
//
// Order of summation, the same for every element: ((0 + 1) + (2 + 3)) + ((4 + 5) + (6 + 7)), each addition rounded to
// the dtype; where the number of ranks is no power of two the missing ranks are left out. Ranks count from the root on.
// Sent: every rank but the root its array once upwards; downwards n - 1 arrays by all ranks together.
#include <vector>

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

  // The sum of all ranks arrives in `total` of the root; other ranks' `total` is used on the way.
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
  } else {  // only the root's array changes
    Scratch total(call, tree.bytes);
    tree.memory.copy(total.data(), call.in, tree.bytes);
    tree.reduce(total.data());
    if (tree.place == 0) tree.memory.copy(call.out, total.data(), tree.bytes);
  }
  return tree.sent;
}

// Through a root: what DataParallel and a parameter server do. Simple, and the root's link is the bottleneck.
//
//   1 \            / 1
//   2 -> 0 (sum) -> 2        gather, then broadcast
//   3 /            \ 3
//
// Order of summation: rank order, in float32, rounded once; the same bits as the direct exchange. The root receives and
// sends n - 1 arrays; every other rank sends and receives one.

namespace {

constexpr int kRootTag = -4;

struct TreeRoot {
  Transport& t;
  const Call& call;
  int n = t.size(), rank = t.rank();
  int64_t element = size_of(call.dtype), all = call.bytes();
  int64_t sent = 0;
  Memory memory{call};

  Range range(int r) const { return piece(call.count, n, r); }
  void send(int to, const std::byte* data, int64_t bytes) {
    memory.send(t, to, kRootTag, data, bytes);
    sent += bytes;
  }

  // The sum of everybody's whole array, on rank 0.
  void reduce(const std::byte* in, std::byte* out) {
    if (rank != 0) return send(0, in, all);
    std::vector<Scratch> theirs;
    std::vector<const std::byte*> arrays(static_cast<size_t>(n), in);
    for (int r = 1; r < n; ++r) {
      theirs.emplace_back(call, all);
      memory.recv(t, r, kRootTag, theirs.back().data(), all);
      arrays[static_cast<size_t>(r)] = theirs.back().data();
    }
    memory.reduce_ranks(arrays, std::span(&out, 1), {0, call.count});
  }
  void broadcast(std::byte* data) {
    if (rank != 0) return memory.recv(t, 0, kRootTag, data, all);
    for (int r = 1; r < n; ++r) send(r, data, all);
  }
  void scatter(const std::byte* whole, std::byte* own) {
    if (rank != 0) return memory.recv(t, 0, kRootTag, own, range(rank).size() * element);
    for (int r = 1; r < n; ++r) send(r, whole + range(r).begin * element, range(r).size() * element);
    memory.copy(own, whole, range(0).size() * element);
  }
  void gather(const std::byte* own, std::byte* whole) {
    if (rank != 0) return send(0, own, range(rank).size() * element);
    memory.copy(whole, own, range(0).size() * element);
    for (int r = 1; r < n; ++r)
      memory.recv(t, r, kRootTag, whole + range(r).begin * element, range(r).size() * element);
  }
};

}  // namespace

int64_t root(Transport& t, const Call& call) {
  TreeRoot r{t, call};
  if (call.op == Op::all_reduce) {
    r.reduce(call.in, call.out);
    r.broadcast(call.out);
  } else if (call.op == Op::reduce_scatter) {
    Scratch total(call, r.rank == 0 ? r.all : 0);
    r.reduce(call.in, total.data());
    r.scatter(total.data(), call.out);
  } else {
    r.gather(call.in, call.out);
    r.broadcast(call.out);
  }
  return r.sent;
}

}  // namespace tessera
