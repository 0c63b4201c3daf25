// Calibration.
#include "verify/tolerance.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "train/plan.h"
#include "verify/comparison.h"
#include "verify/reference.h"

namespace tessera {
namespace {

constexpr double kExact = 1e-12;                                // of float64
constexpr double kLeast = 64, kLeastOfFp32 = 128, kMost = 256;  // of k
constexpr double kSafety = 4, kGrowth = 1.03;

std::vector<NamedTensor> gradients_of(Reference& run) {
  std::vector<NamedTensor> out;
  for (const FlatUnit& unit : run.units())
    for (const Slot& slot : unit.slots)
      out.push_back({slot.parameter->name, unit.grads.narrow(0, slot.begin, slot.size).reshape(slot.parameter->whole)});
  return out;
}

// The largest relative difference of a gradient between two serial runs, in any step: a tensor whose gradient is small
// beside what it is summed from may come to that late. Both go on with the same gradients.
double difference_of_orders(Job job, const Sequences& sequences) {
  job.plan.microbatches = 1;
  Reference together(job, sequences, {});
  Job apart = job;
  apart.plan.microbatches = job.optim.batch;
  Reference one_by_one(apart, sequences, {});
  double worst = 0;
  for (int64_t step = 0; step < job.optim.steps; ++step) {
    const StepReport report = together.compute_gradients();
    one_by_one.compute_gradients();
    const std::vector<NamedTensor> expected = gradients_of(together), found = gradients_of(one_by_one);
    size_t i = 0;
    for (const FlatUnit& unit : together.units())
      for (const Slot& slot : unit.slots) {
        worst = std::max(worst, relative_distance(*slot.parameter, expected[i].tensor, found[i].tensor));
        ++i;
      }
    one_by_one.adopt(expected);
    together.update(report);
    one_by_one.update(report);
  }
  return worst;
}

}  // namespace

Tolerance tolerance_of(const Job& job, const Sequences& sequences) {
  const DType dtype = job.optim.dtype;
  if (dtype == DType::float64) return {kExact, fmt::format("{:g}", kExact)};
  const double eps = std::ldexp(1.0, dtype == DType::bfloat16 ? -8 : -24);
  const auto layers = static_cast<double>(job.model.layers);
  const double unit = std::pow(kGrowth, layers) * eps, found = difference_of_orders(job, sequences);
  const double k = std::clamp(kSafety * found / unit, dtype == DType::float32 ? kLeastOfFp32 : kLeast, kMost);
  return {k * unit,
          fmt::format("{:.3g} = k 1.03^{} eps with k = {:.3g}; two orders of summation on one rank differ by {:.3g}",
                      k * unit, layers, k, found)};
}

}  // namespace tessera
