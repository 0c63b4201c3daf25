// Rows that several ranks measure together: threads that the row launches, or the processes of an MPI job, of which
// rank 0 runs Google Benchmark and tells the others what comes next.
#pragma once
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "bench/row.h"
#include "parallel/comm/launch.h"
#include "train/plan.h"

namespace tessera::bench {

// What the ranks of a row found. Every row's figures are of `seconds`, so rates times it are what was done.
struct Measured {
  double seconds = 0;  // of an iteration: the median, by the slowest rank
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
  Communicator* job = nullptr;  // of the MPI job; null: ranks are threads

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

}  // namespace tessera::bench
