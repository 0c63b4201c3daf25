// What a run has sent and held, over all ranks.
#pragma once
#include <string>
#include <vector>

#include "parallel/comm/communicator.h"

namespace tessera {

struct SentBytes {
  std::string axis, operation;
  int64_t calls = 0, bytes = 0;  // sums over ranks
  int64_t most = 0;              // bytes that the busiest rank sent, where it is known
};
struct RunUsage {
  std::vector<int64_t> peak_bytes;  // of each rank's arena
  std::vector<SentBytes> sent;      // what was used at all
};

// The counts of axes, the world maybe among them, up to now; the same on every rank. Every rank calls it.
RunUsage usage_of(Communicator& world, const std::vector<Communicator*>& axes, const ArenaPtr& arena);

}  // namespace tessera
