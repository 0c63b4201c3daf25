// Ring: bandwidth-optimal, n - 1 steps to reduce and n - 1 to distribute (Patarasuk and Yuan 2009, "Bandwidth optimal
// all-reduce algorithms for clusters of workstations").
//
//   rank 0 -> rank 1 -> rank 2 -> rank 3 -> rank 0        each rank sends right and receives from its left
//
// In step s rank r sends chunk r - s - 1 and adds the received values to chunk r - s - 2, all modulo n. Chunk c is
// summed in the order of ranks c + 1, c + 2, ..., n - 1, 0, ..., c, each addition rounded to the dtype, so results
// depend on chunk boundaries. Each rank sends all but one chunk in each half, 2 (n - 1) / n of the array for an
// all-reduce.
#include <cstdint>

#include "parallel/comm/algorithms.h"
#include "parallel/comm/memory.h"

namespace tessera {
namespace {

constexpr int kTag = -2;

struct Ring {
  Transport& t;
  const Call& call;
  int n = t.size(), rank = t.rank();
  int right = (rank + 1) % n, left = (rank + n - 1) % n;
  int64_t element = element_size(call.dtype);
  int64_t sent = 0;
  Memory memory{call};

  Range range(int p) const { return chunk_range(call.count, n, ((p % n) + n) % n); }
  void send(const std::byte* data, int64_t bytes) {
    memory.send(t, right, kTag, data, bytes);
    sent += bytes;
  }

  // `in` is every rank's full array and is not modified.
  void reduce_scatter(const std::byte* in, std::byte* out) {
    Scratch sum(call, (call.count + n - 1) / n * element);
    Range held = range(rank - 1);
    memory.copy(sum.data(), in + held.begin * element, held.size() * element);
    for (int s = 0; s < n - 1; ++s) {
      send(sum.data(), held.size() * element);
      held = range(rank - s - 2);
      memory.recv(t, left, kTag, sum.data(), held.size() * element);
      memory.reduce_into(sum.data(), in + held.begin * element, held.size());
    }
    memory.copy(out, sum.data(), held.size() * element);
  }

  // Each rank's chunk is in its place inside `full`.
  void all_gather(std::byte* full) {
    for (int s = 0; s < n - 1; ++s) {
      const Range mine = range(rank - s), next = range(rank - s - 1);
      send(full + mine.begin * element, mine.size() * element);
      memory.recv(t, left, kTag, full + next.begin * element, next.size() * element);
    }
  }
};

}  // namespace

int64_t ring(Transport& t, const Call& call) {
  Ring r{t, call};
  std::byte* const own = call.out + r.range(r.rank).begin * r.element;  // valid if out is the full array
  const int64_t bytes = r.range(r.rank).size() * r.element;
  if (call.op == Op::reduce_scatter) {
    r.reduce_scatter(call.in, call.out);
  } else {
    if (call.op == Op::all_reduce)
      r.reduce_scatter(call.in, own);
    else
      r.memory.copy(own, call.in, bytes);
    r.all_gather(call.out);
  }
  return r.sent;
}

}  // namespace tessera
