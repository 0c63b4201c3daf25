// Calibration.
#include "app/verify/tolerance.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "app/plan.h"
#include "app/verify/comparison.h"
#include "app/verify/reference.h"

namespace tessera {
namespace {

constexpr double kExact = 1e-12;            // of float64
constexpr double kLeast = 64, kMost = 256;  // of k
constexpr double kSafety = 4, kGrowth = 1.03;

std::vector<NamedTensor> gradients_of(Reference& run) {
  std::vector<NamedTensor> out;
  for (const FlatUnit& unit : run.units())
    for (const Slot& slot : unit.slots)
      out.push_back({slot.name, unit.grads.narrow(0, slot.begin, slot.shape.numel()).reshape(slot.shape)});
  return out;
}

// The largest relative difference of a gradient between two serial runs, in any step: a tensor whose gradient is small
// beside what it is summed from may come to that late. Both go on with the same gradients.
double difference_of_orders(TrainOptions o, const Sequences& sequences) {
  o.microbatches = 1;
  Reference together(o, sequences, {});
  TrainOptions apart = o;
  apart.microbatches = o.batch;
  Reference one_by_one(apart, sequences, {});
  double worst = 0;
  for (int64_t step = 0; step < o.steps; ++step) {
    const StepReport report = together.compute_gradients();
    one_by_one.compute_gradients();
    const std::vector<NamedTensor> expected = gradients_of(together), found = gradients_of(one_by_one);
    for (size_t i = 0; i < expected.size(); ++i)
      worst = std::max(worst, relative_distance(expected[i].name, expected[i].tensor, found[i].tensor));
    one_by_one.adopt(expected);
    together.update(report);
    one_by_one.update(report);
  }
  return worst;
}

}  // namespace

Tolerance tolerance_of(const TrainOptions& o, const Sequences& sequences) {
  if (o.dtype == "fp64") return {kExact, fmt::format("{:g}", kExact)};
  const double eps = std::ldexp(1.0, o.dtype == "bf16" ? -8 : -24);
  const auto layers = static_cast<double>(sizes_of(o).layers);
  const double unit = std::pow(kGrowth, layers) * eps, found = difference_of_orders(o, sequences);
  const double k = std::clamp(kSafety * found / unit, kLeast, kMost);
  return {k * unit,
          fmt::format("{:.3g} = k 1.03^{} eps with k = {:.3g}; two orders of summation on one rank differ by {:.3g}",
                      k * unit, layers, k, found)};
}

}  // namespace tessera
