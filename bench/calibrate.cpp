// The order in which a machine is measured, and communication.
#include "bench/calibrate.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <tuple>
#include <vector>

#include "bench/ceilings.h"
#include "parallel/comm/launch.h"

namespace tessera::bench {
namespace {

using planner::Company;
using planner::Exchange;
using planner::Machine;

constexpr std::array<DType, 2> kTypes = {DType::float32, DType::bfloat16};

// An array of so many bytes on every rank; for `send` to the next rank and from the one before.
void exchange(Exchange what, Communicator& world, const Tensor& x, const Tensor& y) {
  const int n = world.size(), r = world.rank();
  const Range own = piece(x.numel(), n, r);
  const Tensor mine = x.narrow(0, own.begin, own.size());
  switch (what) {
    case Exchange::all_reduce:
      return world.all_reduce(x);
    case Exchange::reduce_scatter:
      return world.reduce_scatter(x, mine);
    case Exchange::all_gather:
      return world.all_gather(mine, x);
    case Exchange::all_to_all:
      return world.all_to_all(x, y);
    case Exchange::send:
      world.send(x, (r + 1) % n);
      return world.recv(y, (r + n - 1) % n);
  }
}

}  // namespace

// Each size in turn in every round, so that a machine that is slow for a moment is slow for all; the median counts.
planner::LinkCost measure_exchange(Exchange what, const Calibration& how, Communicator& world) {
  constexpr std::array<int64_t, 6> kBytes = {256, 8 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20};
  std::vector<std::vector<double>> seconds(kBytes.size());
  const ArenaPtr arena = world.make_arena();
  for (int round = -1; round < how.rounds; ++round)
    for (size_t i = 0; i < kBytes.size(); ++i) {
      const Tensor x = Tensor::zeros({kBytes[i] / 4}, DType::float32, arena),
                   y = Tensor::zeros({kBytes[i] / 4}, DType::float32, arena);
      const auto repeats = static_cast<int>(std::clamp<int64_t>((1 << 18) / kBytes[i], 1, 50));
      world.barrier();
      const auto start = std::chrono::steady_clock::now();
      for (int j = 0; j < repeats; ++j) exchange(what, world, x, y);
      const std::chrono::duration<double> took = std::chrono::steady_clock::now() - start;
      if (round >= 0) seconds[i].push_back(world.max(took.count()) / repeats);
    }
  std::vector<planner::Timed> timed;
  for (size_t i = 0; i < kBytes.size(); ++i) {
    std::ranges::nth_element(seconds[i], seconds[i].begin() + std::ssize(seconds[i]) / 2);
    timed.push_back({{1, static_cast<double>(kBytes[i])}, seconds[i][seconds[i].size() / 2]});
  }
  const planner::Cost cost = planner::fit(timed);
  return {cost[0], cost[1]};
}

Machine calibrate(const planner::Identity& identity, const Calibration& how,
                  const std::function<void(std::string_view)>& say) {
  Machine m{
      .identity = identity,
      .memory_bytes = static_cast<double>(::sysconf(_SC_PHYS_PAGES)) * static_cast<double>(::sysconf(_SC_PAGESIZE))};
  const auto processors = static_cast<int>(identity.processors);
  const auto on = [](int ranks, int threads, const std::function<void(Communicator&)>& body) {
    launch({.ranks = ranks, .threads_per_rank = threads}, body);
  };
  on(1, processors, [&](Communicator&) {
    for (size_t t = 0; t < kTypes.size(); ++t) {
      const Ceilings most = measure_ceilings(kTypes[t], int64_t{32} << 20, make_arena());
      m.product_flops_per_s[t] = most.flops;
      m.copy_bytes_per_s = std::max(m.copy_bytes_per_s, most.bytes_per_s);
    }
  });
  for (const auto& [company, ranks, threads, what] :
       {std::tuple{Company::alone, 1, 1, "one rank alone"},
        {Company::together, processors, 1, "a rank on every processor"},
        {Company::threads, 1, processors, "a rank with a thread on every processor"}}) {
    say(fmt::format("measuring the kernels of a step: {}", what));
    auto& costs_of = m.costs[static_cast<size_t>(company)];
    on(ranks, threads, [&](Communicator& world) {
      for (size_t t = 0; t < kTypes.size(); ++t) {
        const Machine::Costs costs = measure_kernels(kTypes[t], how, world);
        if (world.rank() == 0) costs_of[t] = costs;
      }
    });
  }
  say("measuring communication between ranks");
  for (const int ranks : {2, 4, 8})
    on(ranks, 1, [&](Communicator& world) {
      for (size_t e = 0; e < planner::kExchangeNames.size(); ++e) {
        const planner::LinkCost link = measure_exchange(static_cast<Exchange>(e), how, world);
        if (world.rank() == 0) m.links[e][ranks] = link;
      }
    });
  return m;
}

}  // namespace tessera::bench
