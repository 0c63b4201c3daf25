// A row of the microbenchmarks: its name and what it does under Google Benchmark.
#pragma once
#include <benchmark/benchmark.h>

#include <chrono>
#include <cstdint>
#include <functional>
#include <regex>
#include <string>
#include <string_view>
#include <vector>

#include "tensor/device.h"

namespace tessera::bench {

struct Row {
  std::string name;
  std::function<void(benchmark::State&)> run;
  benchmark::TimeUnit unit = benchmark::kMicrosecond;
  int64_t iterations = 0;  // unless `--benchmark_min_time` says how long; 0: as many as that takes
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
double seconds_of(const F& f) {
  const auto start = std::chrono::steady_clock::now();
  f();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

// Runs with the words behind `bench` (Google Benchmark's flags). `print` gets what is for standard output. Throws
// Error: usage for a word that it does not know and for a filter that matches nothing, verification where a row sent
// other bytes than the closed form says; and OutputError.
void run_benchmarks(const std::vector<std::string>& words, Device device,
                    const std::function<void(std::string_view)>& print);

}  // namespace tessera::bench
