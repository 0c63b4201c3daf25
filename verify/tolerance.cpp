// Tolerance, calibrated by serial runs.
#include "verify/tolerance.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "tensor/cuda/gpus.h"
#include "verify/comparison.h"
#include "verify/reference.h"

namespace tessera {

namespace {

constexpr double kExact = 1e-12;         // in float64
constexpr double kMin = 64, kMax = 256;  // range of k
constexpr double kSafety = 4, kGrowth = 1.03;

std::vector<NamedTensor> compute_gradients(Reference& run) {
  std::vector<NamedTensor> out;
  for (const FlatUnit& unit : run.trained())
    for (const Slot& slot : unit.slots)
      out.push_back(
          {slot.parameter->name, unit.grads.narrow(0, slot.begin, slot.size).reshape(slot.parameter->full_shape)});
  return out;
}

double difference(Reference& run, Reference& other) {
  const std::vector<NamedTensor> expected = compute_gradients(run), found = compute_gradients(other);
  double worst = 0;
  size_t i = 0;
  for (const FlatUnit& unit : run.trained())
    for (const Slot& slot : unit.slots) {
      const Tensor& e = expected[i].tensor;
      worst = std::max(worst, relative_distance(*slot.parameter, e, found[i++].tensor.to(e.dtype())));
    }
  return worst;
}

// Maximum over steps: a tensor whose gradient is small compared with its addends may differ most in late steps. Both
// runs continue with the same gradients.
double difference_of_orders(TrainConfig job, const Sequences& sequences, const Working& working) {
  job.plan.microbatches = 1;
  Reference together(job, sequences, {});
  job.plan.microbatches = job.optim.batch;
  Reference one_by_one(job, sequences, {});
  if (job.model.experts.count > 0) one_by_one.replay(together.record_choices());
  double worst = 0;
  for (int64_t step = 0; step < job.optim.steps; ++step) {
    working("calibrating the bound by two summation orders", step);
    const StepReport report = together.compute_gradients();
    one_by_one.compute_gradients();
    worst = std::max(worst, difference(together, one_by_one));
    one_by_one.adopt(compute_gradients(together));
    together.update(report);
    one_by_one.update(report);
  }
  return worst;
}

// Maximum over steps of a serial fp32 run's error relative to float64 at the same values. Both run on the CPU if the
// GPU has no float64 kernels.
double error_of_fp32(TrainConfig job, const Sequences& sequences, const Working& working) {
  if constexpr (kWithCuda)
    if (!cuda::has_float64_kernels()) job.plan.device = Device::cpu;
  job.plan.microbatches = 1;
  Reference run(job, sequences, {});
  job.optim.dtype = DType::float64;
  Reference exact(job, sequences, {});
  if (job.model.experts.count > 0) exact.replay(run.record_choices());
  double worst = 0;
  for (int64_t step = 0; step < job.optim.steps; ++step) {
    for (size_t u = 0; u < run.units().size(); ++u) {
      Tensor values = exact.units()[u].values;
      values.copy_from(run.units()[u].values);
    }
    working("calibrating the bound by fp32 versus fp64", step);
    const StepReport report = run.compute_gradients(), exactly = exact.compute_gradients();
    worst = std::max(worst, difference(exact, run));
    run.update(report);
    exact.update(exactly);
  }
  return worst;
}

}  // namespace

Tolerance compute_tolerance(DType dtype, int64_t layers, double orders, double error) {
  if (dtype == DType::float64) return {kExact, fmt::format("{:g}", kExact)};
  const double eps = std::ldexp(1.0, dtype == DType::bfloat16 ? -8 : -24),
               unit = std::pow(kGrowth, static_cast<double>(layers)) * eps,
               k = std::clamp(std::max(kSafety * orders, 2 * error) / unit, kMin, kMax);
  return {k * unit,
          fmt::format("{:.3g} = k 1.03^{} eps with k = {:.3g}; two summation orders on one rank differ by {:.3g}{}",
                      k * unit, layers, k, orders, error > 0 ? fmt::format(", float64 by {:.3g}", error) : "")};
}

Tolerance compute_tolerance(const TrainConfig& job, const Sequences& sequences, const Working& working) {
  const DType dtype = job.optim.dtype;
  const double orders = dtype == DType::float64 ? 0 : difference_of_orders(job, sequences, working),
               error = dtype == DType::float32 ? error_of_fp32(job, sequences, working) : 0;
  return compute_tolerance(dtype, job.model.layers, orders, error);
}

}  // namespace tessera
