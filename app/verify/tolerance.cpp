// Calibration.
#include "app/verify/tolerance.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "app/plan.h"
#include "app/verify/comparison.h"
#include "app/verify/reference.h"

namespace tessera {
namespace {

constexpr double kExact = 1e-12;            // of float64
constexpr double kLeast = 32, kMost = 256;  // of k
constexpr double kSafety = 4, kGrowth = 1.03;

// The largest relative difference of a gradient between two serial runs.
double difference_of_orders(TrainOptions o, const Sequences& sequences) {
  o.microbatches = 1;
  Reference together(o, sequences, {});
  TrainOptions apart = o;
  apart.microbatches = o.batch;
  Reference one_by_one(apart, sequences, {});
  together.step();
  one_by_one.step();
  double worst = 0;
  for (size_t u = 0; u < together.units().size(); ++u)
    for (const Slot& slot : together.units()[u].slots) {
      const auto part = [&](Reference& run) {
        return run.units()[u].grads.narrow(0, slot.begin, slot.shape.numel()).reshape(slot.shape);
      };
      worst = std::max(worst, relative_distance(slot.name, part(together), part(one_by_one)));
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
