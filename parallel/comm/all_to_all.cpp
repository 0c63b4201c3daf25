// All-to-all with even or uneven chunks: n - 1 steps, in each of which a rank sends to the rank `step` places after it.
#include <cstdint>
#include <numeric>
#include <vector>

#include "parallel/comm/algorithms.h"
#include "parallel/comm/memory.h"

namespace tessera {

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
