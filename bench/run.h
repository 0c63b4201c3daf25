// A row of the microbenchmarks: its name and what it does under Google Benchmark.
#pragma once
#include <benchmark/benchmark.h>

#include <chrono>
#include <limits>
#include <regex>

#include "models/language_model.h"

namespace tessera::bench {

struct Row {
  std::string name;
  std::function<void(benchmark::State&)> run;
  benchmark::TimeUnit unit = benchmark::kMicrosecond;
  int64_t iterations = 0;  // unless `--benchmark_min_time` says how long; 0: as many as that takes
};

// A counter that other rows of the group have: null in JSON, where all rows of a group have the same counters.
inline constexpr double kNone = std::numeric_limits<double>::quiet_NaN();

// The value below which this share of all lies, between the two nearest; `values` is not empty.
double quantile(std::vector<double> values, double share);
// Records the seconds of each round of a row as the list `name` of its JSON; of `rounds` it has `median` and
// `quartiles` too. Other lists are control measurements, taken alternately with the rounds: `reference_rounds` (one
// rank, or the plain loop) and `machine_rounds`.
void add_rounds(benchmark::State& state, const std::vector<double>& seconds, std::string_view name = "rounds");
// Seconds of a fixed amount of work that includes no code of Tessera: multiply-adds in registers and a copy of 4 MiB.
// If these change between two files, the machine has changed.
double machine_seconds();
inline constexpr int kChecks = 5;  // of it before and after a row whose data should stay in caches in between

// Rows that are wanted, besides the filter, and how they are shown. Whoever names ranks wants no row that has none, and
// so with the model and with bytes.
struct Choice {
  Device device = Device::cpu;
  std::optional<DType> dtype = {};
  std::string model = {};  // the name of `sizes`; empty: each group has its own
  ModelConfig sizes = {};
  std::vector<int64_t> ranks = {}, bytes = {};  // empty: the usual ones
  // Text that is printed in place of Google Benchmark's own, made of the JSON of all rows; and what hears of each row.
  std::function<std::string(const std::string& json)> table = {};
  std::function<void(const std::string& name)> done = {};

  bool has(const std::string& name) const;
};

// Which rows run: the names that `--benchmark_filter` means. Google Benchmark reads it so too, but compares it with
// names that have words of its own at their end.

class Selection {
 public:
  // A POSIX extended expression, which may be found anywhere in a name; behind a minus, all names that it is not found
  // in. Empty or "all": every name. Throws Error (usage) for what is no expression.
  explicit Selection(const std::string& filter);
  bool has(const std::string& name) const { return std::regex_search(name, expression_) != inverted_; }

 private:
  bool inverted_;
  std::regex expression_;
};

// The microbenchmarks of `tessera bench`, under Google Benchmark: the groups `op/`, `collective/`, `strategy/` and
// `schedule/`. Under mpirun those whose ranks are the job's; rank 0 prints.

template <class F>
double measure_seconds(const F& f) {
  const auto start = std::chrono::steady_clock::now();
  f();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

// Runs with the words behind `bench` (Google Benchmark's flags). `print` gets what is for standard output. Throws
// Error: usage for a word that it does not know and for a filter that matches nothing, verification where a row sent
// other bytes than the closed form says; and OutputError.
void run_benchmarks(const std::vector<std::string>& words, const Choice& choice,
                    const std::function<void(std::string_view)>& print);

}  // namespace tessera::bench
