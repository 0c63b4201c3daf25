// Rows of the microbenchmarks, executed by Google Benchmark.
#pragma once
#include <benchmark/benchmark.h>

#include <chrono>
#include <cstdint>
#include <functional>
#include <limits>
#include <optional>
#include <regex>
#include <string>
#include <string_view>
#include <vector>

#include "models/language_model.h"

namespace tessera::bench {

struct Row {
  std::string name;
  std::function<void(benchmark::State&)> run;
  benchmark::TimeUnit unit = benchmark::kMicrosecond;
  int64_t iterations = 0;  // fixed unless --benchmark_min_time is set; 0: determined by time
};

// A counter that does not apply to a row: null in JSON, where all rows of a group have the same counters.
inline constexpr double kNone = std::numeric_limits<double>::quiet_NaN();

// Interpolates linearly; `values` must not be empty.
double quantile(std::vector<double> values, double fraction);
// Adds the seconds of each round to the row's JSON as list `name`; `rounds` also yields `median` and `quartiles`. The
// control measurements `reference_rounds` (one rank or the plain loop) and `machine_rounds` alternate with the rounds.
void add_rounds(benchmark::State& state, const std::vector<double>& seconds, std::string_view name = "rounds");
// Seconds of a fixed workload without Tessera code: multiply-adds in registers and a copy of 4 MiB. A difference
// between two files indicates that the machine has changed.
double machine_seconds();
inline constexpr int kChecks = 5;  // before and after a row, so that caches stay warm between rounds

// A choice of ranks, model or bytes excludes rows to which it does not apply.
struct Choice {
  Device device = Device::cpu;
  std::optional<DType> dtype = {};
  std::string model = {};  // name of `sizes`; empty: default of each group
  ModelConfig sizes = {};
  std::vector<int64_t> ranks = {}, bytes = {};  // empty: defaults
  // table: formats the JSON of all rows, replacing the console output; done: called after each row.
  std::function<std::string(const std::string& json)> table = {};
  std::function<void(const std::string& name)> done = {};

  bool has(const std::string& name) const;
};

// Matches --benchmark_filter against row names, without the suffixes that Google Benchmark appends.

class Selection {
 public:
  // A POSIX extended regular expression, searched anywhere in a name; a leading minus inverts it. Empty or "all"
  // selects all. Throws Error (usage) for an invalid expression.
  explicit Selection(const std::string& filter);
  bool has(const std::string& name) const { return std::regex_search(name, expression_) != inverted_; }

 private:
  bool inverted_;
  std::regex expression_;
};

// Groups: `op/`, `collective/`, `strategy/` and `schedule/`. With mpirun, only rows with the job's number of ranks run;
// rank 0 prints.

template <class F>
double measure_seconds(const F& f) {
  const auto start = std::chrono::steady_clock::now();
  f();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

// `args`: arguments for Google Benchmark. `print` writes to standard output. Throws Error (usage) for unknown
// arguments and a filter without matches, Error (verification) if the bytes sent differ from the closed form, and
// OutputError.
void run_benchmarks(const std::vector<std::string>& args, const Choice& choice,
                    const std::function<void(std::string_view)>& print);

}  // namespace tessera::bench
