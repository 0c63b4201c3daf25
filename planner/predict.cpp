// The model of a step.
#include "planner/predict.h"

#include <algorithm>

namespace tessera::planner {

Prediction predict(const Case& c) {
  const Plan& p = c.layout.plan;
  const double tokens = static_cast<double>(c.layout.batch()) * static_cast<double>(c.model.context);
  const double ranks = static_cast<double>(p.ranks());
  const double flops = 6 * parameters(c.model) * tokens;
  Prediction out;
  out.parts.compute = flops / ranks / (c.hardware.peak_flops * c.hardware.product_efficiency);
  const double m = static_cast<double>(p.microbatches);
  out.parts.bubble = out.parts.compute * static_cast<double>(p.pp - 1) / m;
  out.step_s = out.parts.sum();
  out.fastest_s = out.step_s * c.hardware.range_fastest;
  out.slowest_s = out.step_s * c.hardware.range_slowest;
  out.tokens_per_s = tokens / out.step_s;
  out.tflops_per_rank = flops / ranks / out.step_s / 1e12;
  out.mfu = out.hfu = flops / ranks / out.step_s / c.hardware.peak_flops;
  out.bubble = out.parts.bubble / out.step_s;
  const double here = parameters(c.model) / static_cast<double>(p.tp * p.pp);
  out.memory.assign(static_cast<size_t>(p.pp), {.parameters = here * c.software.parameter_bytes,
                                                .gradients = here * c.software.gradient_bytes,
                                                .optimizer = here * c.software.state_bytes});
  const double over = out.memory[0].peak() - c.hardware.memory_bytes;
  out.fits = over <= 0;
  out.over_bytes = std::max(0.0, over);
  return out;
}

Prediction estimate(const Case& c) { return predict(c); }

}  // namespace tessera::planner
