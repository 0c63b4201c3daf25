// Sends first, since none of them waits; then what the others sent.
#include "parallel/comm/uneven.h"

#include <numeric>

#include "parallel/comm/memory.h"

namespace tessera {
namespace {

constexpr int kTag = 7002;

Range part(const std::vector<int64_t>& sizes, int r) {
  const int64_t begin = std::accumulate(sizes.begin(), sizes.begin() + r, int64_t{0});
  return {begin, begin + sizes[static_cast<size_t>(r)]};
}

}  // namespace

Range piece_for(const Call& call, int ranks, int r) {
  return call.pieces ? part(call.pieces->sent, r) : piece(call.count, ranks, r);
}

Range piece_from(const Call& call, int ranks, int r) {
  return call.pieces ? part(call.pieces->received, r) : piece(call.count, ranks, r);
}

int64_t exchange_uneven(Transport& t, const Call& call) {
  const Memory memory(call);
  const int own = t.rank(), ranks = t.size();
  const int64_t element = size_of(call.dtype);
  int64_t left = 0;
  for (int step = 1; step < ranks; ++step) {
    const int other = (own + step) % ranks;
    const Range there = piece_for(call, ranks, other);
    if (there.size() == 0) continue;
    memory.send(t, other, kTag, call.in + there.begin * element, there.size() * element);
    left += there.size() * element;
  }
  const Range here = piece_for(call, ranks, own);
  memory.copy(call.out + piece_from(call, ranks, own).begin * element, call.in + here.begin * element,
              here.size() * element);
  for (int step = 1; step < ranks; ++step) {
    const int other = (own + ranks - step) % ranks;
    const Range back = piece_from(call, ranks, other);
    if (back.size() > 0) memory.recv(t, other, kTag, call.out + back.begin * element, back.size() * element);
  }
  return left;
}

}  // namespace tessera
