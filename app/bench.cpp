// The command `bench`: the microbenchmarks.
#include "app/commands.h"
#include "app/device.h"
#include "bench/op_bench.h"

namespace tessera {

int run_bench(const BenchOptions& o) {
  check_device(o.device);
  bench::run_benchmarks(o.words, [&] { return rank_arena(o.device, 0); });
  return 0;
}

}  // namespace tessera
