// Benchmark rows with several ranks: threads, or processes of an MPI job, in which rank 0 runs Google Benchmark and
// broadcasts the next row.
#pragma once
#include <algorithm>
#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "bench/calibrate.h"
#include "bench/run.h"
#include "parallel/comm/launch.h"

namespace tessera::bench {

int64_t sent_by(const Communicator& axis);

// Counters refer to `seconds`: a rate times `seconds` is the amount of work.
struct Measured {
  explicit Measured(std::vector<double> all = {0}) : rounds(std::move(all)), seconds(quantile(rounds, 0.5)) {}
  std::vector<double> rounds;                        // seconds per iteration, slowest rank
  double seconds;                                    // median of rounds
  std::vector<double> reference = {}, machine = {};  // see add_rounds()
  std::vector<std::pair<std::string, double>> counters = {};
  std::string label = {}, error = {};

  void add(std::string name, double value) { counters.emplace_back(std::move(name), value); }
  // Bytes sent by all ranks per iteration; the row fails if they differ from the closed form.
  void add_sent(double counted, double closed_form);
};

// Collective: machine_seconds() of the slowest rank.
double slowest_machine(Communicator& world);

struct RankRow {
  std::string name;
  int ranks = 2;
  // Runs on every rank; rank 0's result is reported.
  std::function<Measured(Communicator& world, int64_t iterations)> measure;
  int64_t iterations = 9;  // as in Row
  Backend backend = Backend::threads;
  benchmark::TimeUnit unit = benchmark::kMillisecond;
};

struct Place : Choice {
  Communicator* job = nullptr;  // null: ranks are threads

  bool processes() const { return job != nullptr; }
  // Numbers of ranks: the job's, --ranks, or the default.
  std::vector<int> several(std::vector<int> default_value) const;
  Backend backend() const;
};

// Group `collective/`: every collective with every algorithm that implements it.
//
//   collective/all_reduce/direct/threads/2/1048576    name, algorithm, backend, ranks, bytes; bf16: suffix `/bf16`
//
// As in nccl-tests (doc/PERFORMANCE.md), S is the full array, algbw = S / time, and busbw = algbw times a factor that
// makes it comparable with link bandwidth for any number of ranks.

struct Family {
  std::string name;       // "collective/all_reduce/direct/threads/2"
  double bus_factor = 1;  // busbw / algbw
  std::vector<Sample> samples = {};
};
using Families = std::vector<Family>;

// The rows add samples to `families`, which must outlive them.
std::vector<RankRow> collective_rows(const Place& place, Families& families);

// Group `strategy/`: a step of config C (4 layers, 4 heads, 128 channels, 64 tokens, batch 12, vocabulary 65) or of
// --model with every strategy of every axis and some combinations, relative to one rank.
//
//   strategy/zero-3/fp32/2      strategy, dtype, single-threaded ranks; suffix `/gpt-mini` with --model
//   strategy/one-rank/fp32/1    the trainer on one rank, relative to a plain training loop

std::vector<RankRow> strategy_rows(const Place& place);

// Group `schedule/`: a pipeline step with every schedule, and its bubble, the mean idle fraction of a rank: simulated
// with equal times, by a formula if known, simulated with measured times, and measured if each rank has a core.
//
//   schedule/zb-h1/4/8    schedule, single-threaded ranks, micro-batches of 2 sequences; relative to one rank
//
// Model: --model, or 8 layers, 128 channels, 4 heads, 64 tokens, vocabulary of 256, fp32.

std::vector<RankRow> schedule_rows(const Place& place);

}  // namespace tessera::bench
