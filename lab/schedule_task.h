// Pipelines to schedule: a learner's seed decides the numbers and the rank of each stage, so that a file of another
// learner is refused, and limits lie where no schedule that the product makes reaches them.
#pragma once
#include <string_view>

#include "parallel/pipeline/simulate.h"

namespace tessera::lab {

// What the tasks of a puzzle have in common.
struct ScheduleFamily {
  std::string_view name;
  int ranks, chunks;          // stages on each rank
  int least, most;            // micro-batches
  bool splits = false;        // whether I and W are taught: without them a file has F and B alone
  double in_flight = 0;       // micro-batches that rank 0 may keep; 0: all
  double gradient_done = 0;   // rank r keeps so many fewer than rank r - 1
  bool gives_rank_0 = false;  // rank 0's list is given, and times are even
};

struct ScheduleTask {
  Schedule known = {};              // solves it: the best that the search has found
  Times times = {};                 // of each stage, B twice as long as F, and of a message
  std::vector<int> in_flight = {};  // F that each rank may keep, at most
  double makespan = 0;              // of a step, at most
  bool is_given = false;            // rank 0's list
};

ScheduleTask make_task(const ScheduleFamily& family, uint64_t seed);

// The schedules of these sizes that the product makes, those that exist.
std::vector<Schedule> made_schedules(int ranks, int microbatches);

}  // namespace tessera::lab
