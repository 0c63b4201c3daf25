// A row of the microbenchmarks: its name and what it does under Google Benchmark.
#pragma once
#include <benchmark/benchmark.h>

#include <cstdint>
#include <functional>
#include <string>

namespace tessera::bench {

struct Row {
  std::string name;
  std::function<void(benchmark::State&)> run;
  benchmark::TimeUnit unit = benchmark::kMicrosecond;
  int64_t iterations = 0;  // unless `--benchmark_min_time` says how long; 0: as many as that takes
};

}  // namespace tessera::bench
