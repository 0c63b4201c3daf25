// Steps of training under a plan, one by one, with what they send, hold and wait for: what the rows of strategies and
// of schedules have in common.
#pragma once
#include <chrono>
#include <memory>
#include <vector>

#include "bench/ranks.h"
#include "parallel/comm/held_up.h"
#include "train/trainer.h"

namespace tessera::bench {

class TimedSteps {
 public:
  // Every rank of `world` makes one; `world` and `trace` must outlive it.
  TimedSteps(const Job& job, Communicator& world, Trace* trace = nullptr);
  ~TimedSteps();
  TimedSteps(const TimedSteps&) = delete;
  TimedSteps& operator=(const TimedSteps&) = delete;

  // One step, which counts from the third on: those before find cold caches and unpacked weights. Returns the slowest
  // rank's seconds.
  double step();
  static constexpr int64_t kWarmUp = 2;
  // Of the steps that count: the median of their times, tokens/s, what was sent and held beside the closed forms, and
  // how long communications held up a rank. Every rank calls it.
  Measured result();
  int64_t peak() const { return trainer_->arena()->total().peak; }
  const Schedule& schedule() const { return trainer_->schedule(); }

 private:
  int64_t sent() const;

  Job job_;
  Communicator& world_;
  HeldUp held_up_;
  std::unique_ptr<Trainer> trainer_;
  std::vector<double> seconds_;
  int64_t made_ = 0, sent_ = 0;
  double waited_ = 0;
};

// The tokens that every row trains on.
Sequences sequences_for(const Job& job);
// Adds the most bytes that a rank held, beside the most that were predicted. Every rank calls it.
void add_peak(Measured& m, const Job& job, Communicator& world, int64_t own_peak);

template <class F>
double seconds_of(const F& f) {
  const auto start = std::chrono::steady_clock::now();
  f();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

}  // namespace tessera::bench
