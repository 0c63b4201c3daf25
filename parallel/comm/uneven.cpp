// Sends first, since none of them waits; then what the others sent.
#include "parallel/comm/uneven.h"

#include <numeric>
#include <string>

#include "parallel/comm/memory.h"

namespace tessera {
namespace {

constexpr int kTag = 7002;

}  // namespace

bool UnevenPieces::fit(int ranks) const {
  return std::ssize(counts) == ranks && array.is_contiguous() && begin(ranks) == array.nbytes();
}

int64_t UnevenPieces::begin(int rank) const {
  const auto before = counts.first(static_cast<size_t>(rank));
  return std::accumulate(before.begin(), before.end(), int64_t{0}) * size_of(array.dtype());
}

int64_t exchange_uneven(Transport& t, const Call& call, const UnevenPieces& from, const UnevenPieces& to) {
  const Memory memory(call);
  const int own = t.rank(), ranks = t.size();
  if (from.bytes(own) != to.bytes(own))
    throw CommError("the piece of rank " + std::to_string(own) + " for itself has " + std::to_string(from.bytes(own)) +
                    " bytes where it is sent and " + std::to_string(to.bytes(own)) + " where it arrives");
  int64_t left = 0;
  for (int step = 1; step < ranks; ++step) {
    const int other = (own + step) % ranks;
    if (from.bytes(other) == 0) continue;
    memory.send(t, other, kTag, from.array.address() + from.begin(other), from.bytes(other));
    left += from.bytes(other);
  }
  memory.copy(to.array.address() + to.begin(own), from.array.address() + from.begin(own), to.bytes(own));
  for (int step = 1; step < ranks; ++step) {
    const int other = (own + ranks - step) % ranks;
    if (to.bytes(other) > 0) memory.recv(t, other, kTag, to.array.address() + to.begin(other), to.bytes(other));
  }
  return left;
}

}  // namespace tessera
