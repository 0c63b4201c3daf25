// Runs a plan with threads as ranks, and compares prediction and measurement.
#pragma once
#include <functional>
#include <string>
#include <vector>

#include "planner/predict.h"
#include "train/config.h"

namespace tessera::planner {

// Medians over steps, means over ranks.
struct Measured {
  double step_s = 0;
  Parts parts = {};                     // communication: time that blocked a rank's compute thread
  std::vector<StageTimes> stages = {};  // per micro-batch; 0 for passes not in the schedule
  double bubble = 0;                    // fraction of the step
  MemoryParts memory = {};              // of the peak rank
};
// Trains on synthetic tokens: 3 warm-up steps, then `steps` steps, or fewer (at least 3) if they exceed one minute.
// `working` receives the number of completed steps. check() must have accepted the job.
Measured measure(
    const TrainConfig& job, const std::function<void(int done)>& working = [](int) {}, int steps = 12);

// In seconds or bytes.
struct Compared {
  std::string part = {};  // "step", "F of stage 1", "tp exposed", "memory, gradients"
  double predicted = 0, measured = 0;
  bool off = false;  // differs by more than 15%, and by more than 1% of the step or memory
};
std::vector<Compared> compare(const Prediction& predicted, const Measured& measured);

}  // namespace tessera::planner
