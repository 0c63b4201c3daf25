// One rank's side of an asynchronous run of the command `train`: what rank 0 says and writes, and the checkpoints.
#pragma once
#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "app/train/train.h"
#include "train/async/trainer.h"

namespace tessera {

class AsyncRun {
 public:
  AsyncRun(const Run& run, Communicator& world);
  int execute();  // returns the exit status

 private:
  using Clock = std::chrono::steady_clock;

  void begin(const std::vector<std::string>& passed_over);
  bool train();
  void show(const AppliedPush& push);
  bool validate();
  void finish(const AsyncSummary& summary);
  // checkpoints: app/train/steps.cpp
  void save();
  bool resume(std::vector<std::string>& passed_over);  // whether there was one

  const Run& run_;
  const TrainOptions& o_;
  Communicator& world_;
  AsyncTrainer trainer_;
  std::unique_ptr<TrainOutput> output_;  // rank 0's
  int64_t step_ = 0;                     // that all workers have made, or in a replay their mean
  // on rank 0: what was shown, and of the step that has begun
  int64_t shown_ = 0, pushes_ = 0;
  double losses_ = 0;
  Clock::time_point last_ = Clock::now();
};

}  // namespace tessera
