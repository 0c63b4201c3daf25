// The command `bench`: the microbenchmarks.
#include "app/commands.h"
#include "app/output.h"
#include "bench/run.h"
#include "parallel/comm/launch.h"
#include "tensor/cpu/vectorize.h"
#include "train/device.h"
#include "train/names.h"

namespace tessera {

int run_bench(const BenchOptions& o) {
  const Device device = value_named<Device>(kDeviceNames, o.device).value();
  check_device(device);
  check_threads(cpu::threads() - 1);
  bench::run_benchmarks(o.words, device, print);
  return 0;
}

}  // namespace tessera
