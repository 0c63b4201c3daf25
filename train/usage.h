// Counts of what a run has sent and held, over all ranks.
#pragma once

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
std::optional<Straggler> find_straggler(const std::vector<double>& waited, double seconds);

struct RunUsage {
  std::vector<int64_t> peak_bytes;  // the peak of each rank's arena
  std::vector<SentBytes> sent;      // operations that were used at all
  std::optional<Straggler> straggler = {};
};

// The counts of axes, the world maybe among them, up to now; the same on every rank. Every rank calls it.
RunUsage run_usage(Communicator& world, const std::vector<Communicator*>& axes, const ArenaPtr& arena);

// How routers have shared out tokens over the experts of each layer.

class Trainer;

struct ExpertLoad {
  std::vector<std::vector<int64_t>> rows = {};  // by layer and expert: choices of tokens that it took
  int64_t dropped = 0;                          // choices that found no place
  // The busiest expert of its layer: 2 is twice an even share.
  struct Busiest {
    double times = 0;
    int64_t layer = 0, expert = 0;
  };
  Busiest busiest() const;
  bool empty() const { return rows.empty(); }
};

// In the training steps that this trainer has made since it was last asked, over all ranks, the same on each; empty for
// a model without experts. Every rank calls it.
ExpertLoad expert_load(Trainer& trainer);

// Numbers that stand for many measurements.

// The middle value, the upper one of two; 0 where there is none.
inline double median(std::vector<double> values) {
  if (values.empty()) return 0;
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

}  // namespace tessera
