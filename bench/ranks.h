// Rows that several ranks measure together: threads that the row launches, or the processes of an MPI job, of which
// rank 0 runs Google Benchmark and tells the others what comes next.
#pragma once

#include "bench/calibrate.h"
#include "bench/run.h"
#include "parallel/comm/launch.h"

namespace tessera::bench {

// Bytes that this rank has sent on an axis.
int64_t sent_by(const Communicator& axis);

// The findings of the ranks for a row. Every row's figures are of `seconds`, so a rate times `seconds` is the work that
// was done.
struct Measured {
  explicit Measured(std::vector<double> all = {0}) : rounds(std::move(all)), seconds(quantile(rounds, 0.5)) {}
  std::vector<double> rounds;                        // times of an iteration, by the slowest rank
  double seconds;                                    // their median
  std::vector<double> reference = {}, machine = {};  // control measurements, as add_rounds() describes them
  std::vector<std::pair<std::string, double>> counters = {};
  std::string label = {}, error = {};

  void add(std::string name, double value) { counters.emplace_back(std::move(name), value); }
  // Bytes that all ranks sent in an iteration, beside the closed form's. Where they differ the row has an error.
  void add_sent(double counted, double closed_form);
};

// Seconds of machine_seconds() on all ranks at once, by the slowest. Every rank calls it.
double slowest_machine(Communicator& world);

struct RankRow {
  std::string name;
  int ranks = 2;
  // On every rank; what it returns on rank 0 is the row's.
  std::function<Measured(Communicator& world, int64_t iterations)> measure;
  int64_t iterations = 9;  // as in Row
  Backend backend = Backend::threads;
  benchmark::TimeUnit unit = benchmark::kMillisecond;
};

// Places of the rows, and which of them are wanted.
struct Place : Choice {
  Communicator* job = nullptr;  // communicator of the MPI job; null: ranks are threads

  bool processes() const { return job != nullptr; }
  // How many ranks there may be where there are several: the job's, or those that were said, or any of `usual`.
  std::vector<int> several(std::vector<int> usual) const;
  Backend backend() const;
};

// The group `collective/`: every collective by every algorithm that has a way of its own for it.
//
//   collective/all_reduce/direct/threads/2/1048576        name, algorithm, backend, ranks, bytes; bf16: `/bf16` behind
//
// Sizes and bandwidths are those of nccl-tests (its doc/PERFORMANCE.md): S is the whole array, algbw = S / time, and
// busbw is that times a factor by which it can be compared with the rate of a link, whatever the ranks.

// The samples that the rows of one collective, algorithm, backend, number of ranks and dtype have found.
struct Family {
  std::string name;       // "collective/all_reduce/direct/threads/2"
  double bus_factor = 1;  // busbw / algbw
  std::vector<Sample> samples = {};
};
using Families = std::vector<Family>;

// The rows note their times in `families`, which must outlive them.
std::vector<RankRow> collective_rows(const Place& place, Families& families);

// The group `strategy/`: a step of config C (4 layers, 4 heads, 128 channels, 64 tokens, batch 12, vocabulary 65), or
// of the chosen model, under every strategy of every axis, and some products of them, beside one rank's.
//
//   strategy/zero-3/fp32/2          strategy, dtype, ranks, of one thread each; a chosen model: `/gpt-mini` behind
//   strategy/one-rank/fp32/1        the trainer on one rank, beside a plain loop that knows no ranks

std::vector<RankRow> strategy_rows(const Place& place);

// The group `schedule/`: a step of a pipeline under every schedule, and its bubble, which is the share of a step in
// which the mean rank does not compute: as the simulator has it with equal times, by a formula where one is known, as
// the simulator replays it with the measured times, and as it was where each rank has a processor.
//
//   schedule/zb-h1/4/8          schedule, ranks of one thread each, micro-batches of 2 sequences; beside one rank
//
// The model has 8 layers of 128 channels, 4 heads, 64 tokens and 256 words, in fp32, or is the chosen one.

std::vector<RankRow> schedule_rows(const Place& place);

}  // namespace tessera::bench
