// A plan run here, on ranks that are threads, and its prediction beside what was measured.
#pragma once
#include <functional>
#include <string>
#include <vector>

#include "planner/predict.h"
#include "train/job.h"

namespace tessera::planner {

// Medians over steps, means over ranks.
struct Measured {
  double step_s = 0;
  Parts parts = {};                     // exposed communication: what a rank's own thread was kept by
  std::vector<StageTimes> stages = {};  // for a micro-batch; what a schedule does not do is 0
  double bubble = 0;                    // share of the step
  MemoryParts memory = {};              // the peak rank's
};
// Trains on counted tokens, so many steps after three that do not count, or fewer, three at least, when a minute is
// over. `working` is told how many are done. The job is one that check() has not refused.
Measured measure(
    const Job& job, const std::function<void(int done)>& working = [](int) {}, int steps = 12);

// One part as both say it, in seconds, bytes or a share.
struct Compared {
  std::string part = {};  // "step", "F of stage 1", "tp exposed", "memory, gradients"
  double predicted = 0, measured = 0;
  bool off = false;  // by more than 15%, and by more than 1% of the step or of the memory
};
std::vector<Compared> compare(const Prediction& predicted, const Measured& measured);

}  // namespace tessera::planner
