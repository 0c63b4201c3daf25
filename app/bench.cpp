// The command `bench`: the microbenchmarks.
#include "app/commands.h"
#include "app/output.h"
#include "bench/run.h"
#include "parallel/comm/launch.h"
#include "tensor/cpu/vectorize.h"
#include "train/device.h"

namespace tessera {

int run_bench(const BenchOptions& o) {
  check_device(o.device);
  check_threads(cpu::threads() - 1);
  bench::run_benchmarks(o.words, o.device, print);
  return 0;
}

}  // namespace tessera
