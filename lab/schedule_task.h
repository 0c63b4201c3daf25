// Tasks of schedule puzzles. The seed determines the sizes and the rank of each stage, so files of other learners are
// rejected; no schedule of Tessera meets the limits.
#pragma once
#include <cstdint>
#include <string_view>
#include <vector>

#include "parallel/pipeline/simulate.h"

namespace tessera::lab {

struct ScheduleFamily {
  std::string_view name;
  int ranks, chunks;  // stages on each rank
  int min_microbatches, max_microbatches;
  bool splits = false;           // backward passes are split (I, W)
  double in_flight = 0;          // limit on rank 0 in micro-batches; 0: unlimited
  double decrease_per_rank = 0;  // of the limit, from rank to rank
  bool assigns_rank_0 = false;   // the list of rank 0 is given, and times are equal
};

struct ScheduleTask {
  Schedule known = {};              // best solution of the search
  Times times = {};                 // of stages (B = 2 F) and messages
  std::vector<int> in_flight = {};  // limit of F in flight per rank
  double makespan = 0;              // limit of the step time
  bool is_given = false;            // the list of rank 0
};

ScheduleTask make_task(const ScheduleFamily& family, uint64_t seed);

// Tessera's schedules that exist for these sizes.
std::vector<Schedule> builtin_schedules(int ranks, int microbatches);

}  // namespace tessera::lab
