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

constexpr double kExact = 1e-12;            // of float64
constexpr double kLeast = 64, kMost = 256;  // of k
constexpr double kSafety = 4, kGrowth = 1.03;

std::vector<NamedTensor> gradients_of(Reference& run) {
  std::vector<NamedTensor> out;
  for (const FlatUnit& unit : run.trained())
    for (const Slot& slot : unit.slots)
      out.push_back({slot.parameter->name, unit.grads.narrow(0, slot.begin, slot.size).reshape(slot.parameter->whole)});
  return out;
}

// The largest relative difference between the gradients of two runs.
double difference(Reference& run, Reference& other) {
  const std::vector<NamedTensor> expected = gradients_of(run), found = gradients_of(other);
  double worst = 0;
  size_t i = 0;
  for (const FlatUnit& unit : run.trained())
    for (const Slot& slot : unit.slots) {
      const Tensor& e = expected[i].tensor;
      worst = std::max(worst, relative_distance(*slot.parameter, e, found[i++].tensor.to(e.dtype())));
    }
  return worst;
}

// Between two serial runs, in any step: a tensor whose gradient is small beside what it is summed from may come to that
// late. Both go on with the same gradients.
double difference_of_orders(Job job, const Sequences& sequences) {
  job.plan.microbatches = 1;
  Reference together(job, sequences, {});
  job.plan.microbatches = job.optim.batch;
  Reference one_by_one(job, sequences, {});
  if (job.model.experts.count > 0) one_by_one.replay(together.keep_choices());
  double worst = 0;
  for (int64_t step = 0; step < job.optim.steps; ++step) {
    const StepReport report = together.compute_gradients();
    one_by_one.compute_gradients();
    worst = std::max(worst, difference(together, one_by_one));
    one_by_one.adopt(gradients_of(together));
    together.update(report);
    one_by_one.update(report);
  }
  return worst;
}

// Of a serial run in fp32 from float64 at the same values, in any step.
double error_of_fp32(Job job, const Sequences& sequences) {
  job.plan.microbatches = 1;
  Reference run(job, sequences, {});
  job.optim.dtype = DType::float64;
  Reference exact(job, sequences, {});
  if (job.model.experts.count > 0) exact.replay(run.keep_choices());
  double worst = 0;
  for (int64_t step = 0; step < job.optim.steps; ++step) {
    for (size_t u = 0; u < run.units().size(); ++u) {
      Tensor values = exact.units()[u].values;
      values.copy_from(run.units()[u].values);
    }
    const StepReport report = run.compute_gradients(), exactly = exact.compute_gradients();
    worst = std::max(worst, difference(exact, run));
    run.update(report);
    exact.update(exactly);
  }
  return worst;
}

}  // namespace

Tolerance tolerance_of(DType dtype, int64_t layers, double orders, double error) {
  if (dtype == DType::float64) return {kExact, fmt::format("{:g}", kExact)};
  const double eps = std::ldexp(1.0, dtype == DType::bfloat16 ? -8 : -24),
               unit = std::pow(kGrowth, static_cast<double>(layers)) * eps,
               k = std::clamp(std::max(kSafety * orders, 2 * error) / unit, kLeast, kMost);
  return {k * unit,
          fmt::format("{:.3g} = k 1.03^{} eps with k = {:.3g}; two orders of summation on one rank differ by {:.3g}{}",
                      k * unit, layers, k, orders, error > 0 ? fmt::format(", float64 by {:.3g}", error) : "")};
}

Tolerance tolerance_of(const Job& job, const Sequences& sequences) {
  const DType dtype = job.optim.dtype;
  const double orders = dtype == DType::float64 ? 0 : difference_of_orders(job, sequences),
               error = dtype == DType::float32 ? error_of_fp32(job, sequences) : 0;
  return tolerance_of(dtype, job.model.layers, orders, error);
}

}  // namespace tessera
