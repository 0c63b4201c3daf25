// The command `bench`: the microbenchmarks.
#include "app/commands.h"
#include "bench/op_bench.h"

namespace tessera {

int run_bench(const BenchOptions& o) {
  bench::run_benchmarks(o.words);
  return 0;
}

}  // namespace tessera
