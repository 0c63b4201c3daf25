// Rows that several ranks measure together: threads that the row launches, or the processes of an MPI job, of which
// rank 0 runs Google Benchmark and tells the others what comes next.
#pragma once
#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "bench/run.h"
#include "parallel/comm/launch.h"
#include "parallel/comm/wait.h"
#include "train/batches.h"
#include "train/job.h"
#include "train/plan.h"
#include "train/trainer.h"

namespace tessera::bench {

// The findings of the ranks for a row. Every row's figures are of `seconds`, so a rate times `seconds` is the work that
// was done.
struct Measured {
  double seconds = 0;  // time of an iteration: the median, by the slowest rank
  std::vector<std::pair<std::string, double>> counters = {};
  std::string label = {}, error = {};

  void add(std::string name, double value) { counters.emplace_back(std::move(name), value); }
  // Bytes that all ranks sent in an iteration, beside the closed form's. Where they differ the row has an error.
  void add_sent(double counted, double closed_form);
};

struct RankRow {
  std::string name;
  int ranks = 2;
  // On every rank; what it returns on rank 0 is the row's.
  std::function<Measured(Communicator& world, int64_t iterations)> measure;
  int64_t iterations = 9;  // as in Row
  Backend backend = Backend::threads;
  benchmark::TimeUnit unit = benchmark::kMillisecond;
};

// Where the rows run.
struct Place {
  Device device = Device::cpu;
  Communicator* job = nullptr;  // communicator of the MPI job; null: ranks are threads

  bool processes() const { return job != nullptr; }
  // How many ranks there may be: the job's, or any of `wanted`.
  std::vector<int> ranks(std::vector<int> wanted) const;
  Backend backend() const;
  std::string backend_name() const;
};

// The same rows, in the same order, on every rank of a job.
class RankRows {
 public:
  RankRows(const Place& place, std::vector<RankRow> rows) : place_(place), rows_(std::move(rows)) {}
  std::vector<Row> rows() const;  // for rank 0; valid as long as this object
  void follow() const;            // on the others, until rank 0 dismisses them
  void dismiss() const;

 private:
  Measured measured(size_t row, int64_t iterations) const;
  std::pair<int64_t, int64_t> told(int64_t row, int64_t iterations) const;

  Place place_;
  std::vector<RankRow> rows_;
};

// Training as one would write it with no word of ranks: what the trainer on one rank is measured against.

class PlainLoop {
 public:
  PlainLoop(const Job& job, Sequences sequences);
  void step();
  int64_t peak() const { return arena_->total().peak; }

 private:
  Optimisation optim_;
  Sequences sequences_;
  ArenaPtr arena_ = make_arena();
  std::unique_ptr<LanguageModel> model_;
  std::unique_ptr<Optimizer> optimizer_;
};

// Steps of training under a plan, one by one, with what they send, hold and wait for. The rows of strategies and
// those of schedules are made of them.

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
  // The figures of the steps that count: the median of their times, tokens/s, what was sent and held beside the closed
  // forms, and how long communications held up a rank. Every rank calls it.
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
