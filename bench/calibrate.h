// Fits the communication model alpha + beta S (Hockney 1994), and measures this machine for the planner.
#pragma once
#include <cstdint>
#include <functional>
#include <optional>
#include <string_view>
#include <vector>

#include "parallel/comm/communicator.h"
#include "planner/machine.h"

namespace tessera::bench {

struct Sample {
  double bytes = 0, seconds = 0;
};

struct Fit {
  double latency = 0, bytes_per_s = 0;  // alpha, 1 / beta
  double worst = 0;                     // maximum relative error of a sample
};

// Least squares of relative errors, so that small messages have the same weight; latency is non-negative. nullopt with
// fewer than three sizes or if time does not grow with size.
std::optional<Fit> fit(const std::vector<Sample>& samples);

// Measures kernels, optimizer and communication at training-step sizes in about two minutes, and fits the constants of
// planner/machine.h. As in a step, inputs written by the preceding kernel are cached, weights and saved activations are
// not. Ranks are threads: single-threaded ranks are timed by CPU time, which other processes disturb less; ranks with
// several threads and communication by wall-clock time.

struct Calibration {
  double seconds_of_case = 0.05;      // per kernel and size
  int rounds = 15;                    // per communication operation
  int64_t bytes = int64_t{24} << 20;  // working set of consecutive calls, larger than the caches
};
planner::Machine calibrate(const planner::Identity& identity, const Calibration& how,
                           const std::function<void(std::string_view)>& say);

// Collective over `world`; calibrate() uses rank 0's result.
planner::Machine::Costs measure_kernels(DType dtype, const Calibration& how, Communicator& world);
planner::LinkCost measure_exchange(planner::Exchange exchange, const Calibration& how, Communicator& world);

}  // namespace tessera::bench
