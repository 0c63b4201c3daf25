// What a run has sent and held, over all ranks.
#pragma once
#include <optional>
#include <string>
#include <vector>

#include "parallel/comm/communicator.h"

namespace tessera {

struct SentBytes {
  std::string axis, operation;
  int64_t calls = 0, bytes = 0;  // sums over ranks
  int64_t most = 0;              // bytes that the busiest rank sent, where it is known
};
// The rank for which the others have waited most, and the share of their time that they did.
struct Straggler {
  int rank = 0;
  double share = 0;
};
// `waited`: seconds that all others have waited for each rank, in `seconds` of a run. Nothing where none stands out: by
// a fifth of the time, and by twice what was waited for another on average.
std::optional<Straggler> straggler_of(const std::vector<double>& waited, double seconds);

struct RunUsage {
  std::vector<int64_t> peak_bytes;  // of each rank's arena
  std::vector<SentBytes> sent;      // what was used at all
  std::optional<Straggler> straggler = {};
};

// The counts of axes, the world maybe among them, up to now; the same on every rank. Every rank calls it.
RunUsage usage_of(Communicator& world, const std::vector<Communicator*>& axes, const ArenaPtr& arena);

}  // namespace tessera
