// The model alpha + beta S of a communication (Hockney 1994), fitted to what was measured.
#pragma once

#include "parallel/comm/communicator.h"
#include "planner/machine.h"

namespace tessera::bench {

struct Sample {
  double bytes = 0, seconds = 0;
};

struct Fit {
  double latency = 0, bytes_per_s = 0;  // alpha, 1 / beta
  double worst = 0;                     // the largest relative error of a sample
};

// Least squares of the relative errors of all samples, so that a microsecond counts among microseconds; latency is not
// below 0. Nothing where samples of three sizes or more are not there, or time does not grow with size.
std::optional<Fit> fit(const std::vector<Sample>& samples);

// Measuring this machine for the planner, in about two minutes: products, attention, elementwise kernels, the optimizer
// and communication, each by sizes as training steps have them, and the constants that explain the times.
//
// A call finds its inputs as in a step: what the kernel before it wrote is in the caches, weights and what was saved
// for the backward pass are not. Ranks are threads. Times of single threads are of the processor, so that other work on
// the machine disturbs less; a rank with several threads and communication are timed by the clock on the wall.

struct Calibration {
  double seconds_of_case = 0.05;      // spent on each size of a kernel
  int rounds = 15;                    // rounds of each communication
  int64_t bytes = int64_t{24} << 20;  // memory that a kernel's calls go through in turn: more than caches keep
};
// `say` gets lines for people.
planner::Machine calibrate(const planner::Identity& identity, const Calibration& how,
                           const std::function<void(std::string_view)>& say);

// The parts of it. Every rank of `world` calls them at a time; rank 0's figures are the result.
planner::Machine::Costs measure_kernels(DType dtype, const Calibration& how, Communicator& world);
planner::LinkCost measure_exchange(planner::Exchange exchange, const Calibration& how, Communicator& world);

}  // namespace tessera::bench
