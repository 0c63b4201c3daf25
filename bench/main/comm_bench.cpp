// Times all_reduce of float32 by size and algorithm, and prints microseconds and GB/s (bytes of the array over time).
//
//   build/release/bin/comm_bench [RANKS [ROUNDS]]              ranks that are threads (2)
//   mpirun -n 2 --bind-to none build/release/bin/comm_bench    ranks that are processes, beside MPI's own all-reduce
//
// The ways are timed in turn, ROUNDS times (9), and the median counts, so that a machine that is slow for a moment is
// slow for all. A time is that of the slowest rank.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <charconv>
#include <chrono>
#include <cstdio>
#include <functional>
#include <string>
#include <system_error>
#include <vector>

#include "bench/main/mpi_reference.h"
#include "parallel/comm/backends.h"
#include "parallel/comm/launch.h"
#include "parallel/comm/surroundings.h"

namespace tessera {
namespace {

struct Way {
  std::string name;
  std::function<void()> run;
  std::vector<double> seconds = {};
};

double time_of(Communicator& world, const Way& way, int64_t bytes) {
  const auto repeats = static_cast<int>(std::clamp<int64_t>((16 << 20) / bytes, 2, 2000));
  world.barrier();
  const auto start = std::chrono::steady_clock::now();
  for (int i = 0; i < repeats; ++i) way.run();
  const std::chrono::duration<double> took = std::chrono::steady_clock::now() - start;
  world.set_algorithm(Algorithm::direct);
  return world.max(took.count()) / repeats;
}

std::vector<Way> ways(Communicator& world, bool mpi, const Tensor& x, const Tensor& out) {
  std::vector<Way> all;
  for (const Algorithm algorithm :
       {Algorithm::direct, Algorithm::ring, Algorithm::tree, Algorithm::root, Algorithm::native})
    if (mpi || algorithm != Algorithm::native)
      all.push_back({std::string(name_of(algorithm)), [&world, algorithm, x] {
                       world.set_algorithm(algorithm);
                       world.all_reduce(x);
                     }});
  if constexpr (kWithMpi)
    if (mpi)
      all.push_back({"MPI's, out of place",
                     [x, out] { mpi_all_reduce_out_of_place(x.data<float>(), out.data<float>(), x.numel()); }});
  return all;
}

void measure(Communicator& world, bool mpi, int rounds) {
  if (world.rank() == 0)
    fmt::print("{:>10} {:<20} {:>12} {:>9}   ({} {})\n", "bytes", "algorithm", "us", "GB/s", world.size(),
               mpi ? "MPI ranks" : "thread ranks");
  for (const int64_t bytes : {1 << 10, 64 << 10, 1 << 20, 16 << 20, 64 << 20}) {
    const ArenaPtr arena = world.make_arena();
    const Tensor x = Tensor::zeros({bytes / 4}, DType::float32, arena),
                 out = Tensor::zeros({bytes / 4}, DType::float32, arena);
    std::vector<Way> all = ways(world, mpi, x, out);
    for (int i = -1; i < rounds; ++i)
      for (Way& way : all) {
        const double seconds = time_of(world, way, bytes);
        if (i >= 0) way.seconds.push_back(seconds);
      }
    for (Way& way : all) {
      std::sort(way.seconds.begin(), way.seconds.end());
      const double median = way.seconds[way.seconds.size() / 2];
      if (world.rank() == 0)
        fmt::print("{:>10} {:<20} {:>12.2f} {:>9.2f}\n", bytes, way.name, median * 1e6,
                   static_cast<double>(bytes) / median * 1e-9);
    }
  }
}

// Argument `i`, or `otherwise` where there is none.
int number(const std::vector<std::string>& args, size_t i, int otherwise) {
  if (i >= args.size()) return otherwise;
  int value = 0;
  const char* const end = args[i].data() + args[i].size();
  const auto read = std::from_chars(args[i].data(), end, value);
  if (read.ec != std::errc() || read.ptr != end || value < 1 || args.size() > 2)
    throw Error(fmt::format("expected [RANKS [ROUNDS]], numbers from 1 on, found '{}'", fmt::join(args, " ")));
  return value;
}

int run(const std::vector<std::string>& args) {
  const bool mpi = kWithMpi && mpi_surroundings().has_value();
  const int ranks = mpi ? 1 : number(args, 0, 2), rounds = number(args, 1, 9);
  launch({.backend = mpi ? Backend::mpi : Backend::threads, .ranks = ranks, .threads_per_rank = 1, .timeout_s = 60},
         [&](Communicator& world) { measure(world, mpi, rounds); });
  return 0;
}

}  // namespace
}  // namespace tessera

int main(int argc, char** argv) {
  try {
    return tessera::run({argv + 1, argv + argc});
  } catch (const std::exception& e) {
    std::fprintf(stderr, "comm_bench: %s\n", e.what());
    return 2;
  }
}
