// Communication and memory usage of a run over all ranks.
#pragma once
#include <algorithm>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "parallel/comm/communicator.h"

namespace tessera {

struct SentBytes {
  std::string axis, operation;
  int64_t calls = 0, bytes = 0;  // sums over ranks
  int64_t busiest = 0;           // by the busiest rank, if known
};
// The rank that others waited for longest, and the fraction of their time spent waiting for it.
struct Straggler {
  int rank = 0;
  double fraction = 0;
};
// `waited`: seconds that all others have waited for each rank in a run of `seconds`. nullopt unless one rank accounts
// for a fifth of the time and for twice the average of the others.
std::optional<Straggler> find_straggler(const std::vector<double>& waited, double seconds);

struct RunUsage {
  std::vector<int64_t> peak_bytes;  // by rank, of its arena
  std::vector<SentBytes> sent;      // operations with at least one call
  std::optional<Straggler> straggler = {};
  ArenaPtr arena = {};  // of this rank
};

// Current counts of the axes (which may include the world). Collective; the same on every rank.
RunUsage run_usage(Communicator& world, const std::vector<Communicator*>& axes, const ArenaPtr& arena);

class TrainState;

struct ExpertLoad {
  std::vector<std::vector<int64_t>> rows = {};  // by layer and expert: routed tokens
  int64_t dropped = 0;                          // choices beyond the capacity
  // Highest load relative to its layer's mean.
  struct Busiest {
    double times = 0;
    int64_t layer = 0, expert = 0;
  };
  Busiest busiest() const;
  bool empty() const { return rows.empty(); }
};

// Load in the training steps since the last call; empty without experts. Collective; the same on every rank.
ExpertLoad expert_load(TrainState& train);

// The upper median; 0 if empty.
inline double median(std::vector<double> values) {
  if (values.empty()) return 0;
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

}  // namespace tessera
