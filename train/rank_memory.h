// What every rank of a plan holds, known before there is a rank: between two steps by closed forms, worked out from the
// model's sizes and the plan (Rajbhandari et al. 2020, section 5), and inside of a step by train/stage_memory.h.
#pragma once
#include <cstdint>
#include <vector>

#include "train/job.h"

namespace tessera {

struct HeldBytes {
  int64_t parameters = 0, gradients = 0, optimizer = 0;
  bool operator==(const HeldBytes&) const = default;
};
// Between two steps, of each rank.
std::vector<HeldBytes> expected_memory(const Job& job);

// At its peak. Activations are all that passes hold: of layers, of logits, and workspace.
struct RankMemory {
  bool operator==(const RankMemory&) const = default;
  HeldBytes held;
  int64_t activations = 0, communication = 0;
  int64_t total() const { return held.parameters + held.gradients + held.optimizer + activations + communication; }
};
// The memory of each rank, on its host or its GPU (there without what libraries take while they compute), of a job with
// a known vocabulary that check() has not refused. Takes milliseconds and no memory, whatever the sizes; fewer where
// the model's layers are `alike`. Throws OutOfMemory where a rank needs more addresses than this process may have.
std::vector<RankMemory> memory_of_ranks(const Job& job, bool alike = false);

}  // namespace tessera
