// The microbenchmarks of `tessera bench`, under Google Benchmark: the groups `op/`, `collective/`, `strategy/` and
// `schedule/`. Under mpirun those whose ranks are the job's; rank 0 prints.
#pragma once
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "tensor/device.h"

namespace tessera::bench {

// Runs with the words behind `bench` (Google Benchmark's flags). `print` gets what is for standard output. Throws
// Error: usage for a word that it does not know and for a filter that matches nothing, verification where a row sent
// other bytes than the closed form says; and OutputError.
void run_benchmarks(const std::vector<std::string>& words, Device device,
                    const std::function<void(std::string_view)>& print);

}  // namespace tessera::bench
