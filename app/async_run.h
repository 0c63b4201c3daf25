// One rank of an asynchronous run: its worker, the server beside it, and on rank 0 the output.
#pragma once
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "app/training.h"
#include "models/gpt.h"
#include "optim/lr_schedule.h"
#include "parallel/async_server.h"

namespace tessera {

class AsyncRun {
 public:
  AsyncRun(const Run& run, Communicator& world);
  int execute();  // returns the exit status

 private:
  using Clock = std::chrono::steady_clock;

  AsyncOptions async_options();
  double worker_step(int worker, int64_t step);
  void begin(const std::vector<std::string>& passed_over);
  bool train();
  void show(const AppliedPush& push);
  void validate();
  void finish(const AsyncSummary& summary);
  // checkpoints: app/async_checkpoint.cpp
  void save();
  void resume(std::vector<std::string>& passed_over);
  std::vector<std::string> state_kinds() const;
  void gather(const std::string& suffix, const std::function<Tensor(size_t unit)>& shard,
              std::vector<NamedTensor>& out);
  std::vector<NamedTensor> held();

  const Run& run_;
  const TrainOptions& o_;
  Communicator& world_;
  std::unique_ptr<Communicator> axis_;
  ArenaPtr arena_;
  Gpt model_;
  LrSchedule schedule_;
  AsyncServer server_;
  std::unique_ptr<TrainOutput> output_;  // rank 0's
  int64_t step_ = 0;                     // that all workers have made, or in a replay their mean
  // on rank 0: what was shown, and of the step that has begun
  int64_t shown_ = 0, pushes_ = 0;
  double losses_ = 0;
  Clock::time_point last_ = Clock::now();
};

}  // namespace tessera
