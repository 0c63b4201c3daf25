// Through a root: what DataParallel and a parameter server do. Simple, and the root's link is the bottleneck.
//
//   1 \            / 1
//   2 -> 0 (sum) -> 2        gather, then broadcast
//   3 /            \ 3
//
// Order of summation: rank order, in float32, rounded once; the same bits as the direct exchange. The root receives and
// sends n - 1 arrays; every other rank sends and receives one.
#include <vector>

#include "parallel/comm/algorithms.h"
#include "parallel/comm/memory.h"

namespace tessera {
namespace {

constexpr int kTag = -4;

struct Root {
  Transport& t;
  const Call& call;
  int n = t.size(), rank = t.rank();
  int64_t element = size_of(call.dtype), all = call.bytes();
  int64_t sent = 0;
  Memory memory{call};

  Range range(int r) const { return piece(call.count, n, r); }
  void send(int to, const std::byte* data, int64_t bytes) {
    memory.send(t, to, kTag, data, bytes);
    sent += bytes;
  }

  // The sum of everybody's whole array, on rank 0.
  void reduce(const std::byte* in, std::byte* out) {
    if (rank != 0) return send(0, in, all);
    std::vector<Scratch> theirs;
    std::vector<const std::byte*> arrays(static_cast<size_t>(n), in);
    for (int r = 1; r < n; ++r) {
      theirs.emplace_back(call, all);
      memory.recv(t, r, kTag, theirs.back().data(), all);
      arrays[static_cast<size_t>(r)] = theirs.back().data();
    }
    memory.reduce_ranks(arrays, std::span(&out, 1), {0, call.count});
  }
  void broadcast(std::byte* data) {
    if (rank != 0) return memory.recv(t, 0, kTag, data, all);
    for (int r = 1; r < n; ++r) send(r, data, all);
  }
  void scatter(const std::byte* whole, std::byte* own) {
    if (rank != 0) return memory.recv(t, 0, kTag, own, range(rank).size() * element);
    for (int r = 1; r < n; ++r) send(r, whole + range(r).begin * element, range(r).size() * element);
    memory.copy(own, whole, range(0).size() * element);
  }
  void gather(const std::byte* own, std::byte* whole) {
    if (rank != 0) return send(0, own, range(rank).size() * element);
    memory.copy(whole, own, range(0).size() * element);
    for (int r = 1; r < n; ++r) memory.recv(t, r, kTag, whole + range(r).begin * element, range(r).size() * element);
  }
};

}  // namespace

int64_t root(Transport& t, const Call& call) {
  Root r{t, call};
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
