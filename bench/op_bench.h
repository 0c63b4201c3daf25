// The microbenchmarks of `tessera bench`: every op of the op table, forward and backward, under Google Benchmark.
//
// Each row gives the bytes that the op must move at least (operands and results, once), the arithmetic of its products,
// and `share`: of the time that the slower of the two would take at the machine's measured ceilings.
#pragma once
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "tensor/arena.h"

namespace tessera::bench {

// Runs with the words behind `bench` (Google Benchmark's flags), where the arenas that `make` makes lie: on a GPU with
// larger problems, and the time until it is done. `print` gets what is for standard output. Throws Error (usage) for a
// word that it does not know and for a filter that matches nothing, and OutputError.
void run_benchmarks(const std::vector<std::string>& words, const std::function<ArenaPtr()>& make,
                    const std::function<void(std::string_view)>& print);

}  // namespace tessera::bench
