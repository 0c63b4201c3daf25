// What a rank of a pipeline holds at its peak, from what single micro-batches hold of its stages.
//
// One rank alone takes one micro-batch after another through all stages, so that what each pass takes and gives back is
// seen by itself; ranks of tp and cp that it would speak to are not there. The rest is counting: a rank goes through
// its list, and holds of every micro-batch what it has between its passes, and the most that the pass under way takes.
// Nothing is run in the order of the plan, so a runtime that keeps what it should have let go is seen.
//
//   rank 0:   F0      F1      B0      F2      B1      B2          kept: between F and B of a micro-batch
//   holds    kept   2 kept    kept  2 kept    kept     0          the peak: kept + the most during F or B
#pragma once
#include <cstdint>
#include <vector>

#include "parallel/pipeline/schedule.h"
#include "train/job.h"

namespace tessera {

// Bytes of one micro-batch and stage, beside parameters, gradients and optimizer state.
struct StageMemory {
  int64_t kept = 0;      // from F to B, or to I
  int64_t deferred = 0;  // from I to W
  int64_t forward = 0;   // the most during F,
  int64_t backward = 0;  // during B,
  int64_t input = 0;     // during I,
  int64_t weight = 0;    // and during W; each with what is received, kept and deferred
  int64_t packs = 0;     // packed copies of the weights, which stay
};
// Of every stage of the plan.
std::vector<StageMemory> measure_stages(const Job& job);

// Bytes that one stage hands to the next.
int64_t handed_bytes(const Job& job);

// The most that each pipeline rank holds at a time.
std::vector<int64_t> peaks_of_ranks(const Schedule& plan, const std::vector<StageMemory>& stages, int64_t handed);

}  // namespace tessera
