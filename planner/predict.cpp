// Composition of a step:
//
//   step = passes of the busiest rank + its pipeline bubble + exposed communication of the data axis + update
//
// The passes are split into compute, recomputation, tp, cp and ep; exposed all-gathers of ZeRO-3 count as dp.
#include "planner/predict.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include "base/error.h"
#include "planner/memory.h"
#include "planner/pipeline.h"
#include "planner/prices.h"

namespace tessera::planner {
namespace {

// ZeRO-3: a layer's all-gather overlaps the layer before it, its reduce-scatter the layer after it.
Passes layer_data_times(const Case& c, const WorkTime& layer) {
  const double size = stage_parameters(c, 1, false, false).all();
  Passes sent;
  for (const DataSent& s : data_work(c))
    if (s.each)
      (s.forward ? sent.forward : sent.input) += seconds(c.hardware, {s.exchange, data_axis(c.layout), size * s.bytes});
  if (!c.software.dp_overlap) return sent;
  return {exposed(c.hardware, sent.forward, layer.forward()),
          exposed(c.hardware, sent.input, layer.input() + layer.weight()), 0};
}

// Collectives of a step overlap the last backward pass (gradients) and the next step's first forward pass (parameters);
// Li et al. 2020, "PyTorch Distributed".
double step_data_seconds(const Case& c, double held, const Passes& passes) {
  double sums = 0, values = 0;
  for (const DataSent& s : data_work(c))
    if (!s.each)
      (s.exchange == Exchange::all_gather ? values : sums) +=
          seconds(c.hardware, {s.exchange, data_axis(c.layout), held * s.bytes});
  if (!c.software.dp_overlap) return sums + values;
  const double in_backward = std::min(sums, passes.backward()), in_forward = std::min(values, passes.forward);
  return sums + values - (1 - c.hardware.contention) * (in_backward + in_forward);
}

// The norm reads all gradients; the update reads and writes each parameter's state once.
double update_s(const Case& c, double held) {
  const Software& s = c.software;
  const double n = c.layout.plan.zero == ZeroStage::none ? 1 : real(data_axis(c.layout).ranks);
  return bytes_s(c.hardware, held / n * (2 * s.state_bytes + 3 * s.gradient_bytes + s.parameter_bytes));
}

// Chowdhery et al. 2022, appendix B: 6 N + 12 L q s per token; N excludes embedding lookups and inactive experts.
double model_flops_of_token(const ModelShape& m) {
  const double idle = parameters(m) - active_parameters(m);
  const double matrices = real(m.layers) * layer_parameters(m) - idle + real(m.vocab) * real(m.channels);
  return 6 * matrices + 12 * real(m.layers) * real(m.attended()) * m.keys();
}

void set_rates(const Case& c, const StageTime& all, Prediction& out) {
  const double tokens = real(c.layout.batch()) * real(c.model.context), ranks = real(c.layout.plan.ranks());
  const double each = model_flops_of_token(c.model) * tokens / ranks;
  out.fastest_s = out.step_s * c.hardware.range_fastest;
  out.slowest_s = out.step_s * c.hardware.range_slowest;
  out.tokens_per_s = tokens / out.step_s;
  out.tflops_per_rank = each / out.step_s / 1e12;
  out.mfu = each / out.step_s / c.hardware.peak_flops;
  out.hfu = out.mfu * (1 + (all.flops > 0 ? all.recompute_flops / all.flops / 3 : 0));
}

void set_memory(const Case& c, std::vector<MemoryParts> memory, Prediction& out) {
  out.memory = std::move(memory);
  const auto peak_rank = std::ranges::max_element(out.memory, {}, &MemoryParts::peak);
  out.peak_rank = static_cast<size_t>(peak_rank - out.memory.begin());
  const double over = peak_rank->peak() - c.hardware.usable_bytes();
  out.fits = over <= 0;
  out.over_bytes = std::max(0.0, over);
  double max_bytes = 0;
  for (const auto& [name, part] : kMemoryParts)
    if ((*peak_rank).*part >= max_bytes) max_bytes = (*peak_rank).*part, out.largest = name;
}

struct Stages {
  std::vector<int64_t> layers = {};
  std::vector<int> rank = {};
  std::vector<StageTime> work = {};
  std::vector<StageTimes> times = {};
  double message_s = 0;
  PipelineTime pipeline = {};
};

Stages plan_stages(const Case& c, const std::vector<int64_t>& layers, PipelineClock* clock) {
  const Plan& p = c.layout.plan;
  const StepWork work = step_work(c, Caller::described);
  const WorkTime layer = published_time(c, work.layer), first = published_time(c, work.first),
                 last = published_time(c, work.last);
  const Passes shared = layer_data_times(c, layer);
  Stages s{.layers = layers, .rank = rank_of_stages(p)};
  const double shards = c.software.scatter_messages && !p.sp ? real(p.tp) : 1;
  const double message = seconds(c.hardware, {Exchange::send, pp_axis(c.layout), handed_bytes(c, 2) / shards});
  const double waited = c.software.pp_overlap ? 0 : message;
  s.message_s = message - waited;
  for (size_t i = 0; i < layers.size(); ++i) {
    StageTime& w = s.work.emplace_back();
    w.add(real(layers[i]), layer);
    w.add_dp(real(layers[i]), shared);
    if (i == 0) w.add(1, first);
    if (i + 1 == layers.size()) w.add(1, last);
    const Passes& t = w.all;
    s.times.push_back({t.forward + waited, t.backward() + waited, t.input + waited, t.weight});
  }
  const bool spans = c.software.name != "tessera" && splits_backward(p.schedule);
  s.pipeline = clock ? clock->time(p, s.times, s.message_s, spans) : pipeline_formula(p, s.times, s.message_s, spans);
  return s;
}

// Uses the busiest rank's update and data axis.
Prediction predict_time(const Case& c, const Stages& s) {
  const double m = real(c.layout.plan.microbatches);
  const auto busiest = std::ranges::max_element(s.pipeline.busy) - s.pipeline.busy.begin();
  Prediction out;
  double held = 0;
  Passes once;
  StageTime total;
  for (size_t i = 0; i < s.work.size(); ++i) {
    total.flops += s.work[i].flops, total.recompute_flops += s.work[i].recompute_flops;
    if (s.rank[i] != busiest) continue;
    for (const auto& [name, part] : kParts) out.parts.*part += m * s.work[i].parts.*part;
    held += stage_parameters(c, s.layers[i], i == 0, i + 1 == s.work.size()).all();
    once += s.work[i].all;
  }
  out.parts.bubble = std::max(0.0, s.pipeline.seconds - out.parts.sum());
  out.parts.dp += step_data_seconds(c, held, once);
  out.parts.optimizer = update_s(c, held);
  out.step_s = out.parts.sum();
  out.bubble = s.pipeline.bubble;
  out.stages = s.times;
  out.message_s = s.message_s;
  if (c.hardware.measured) set_measured_times(c, *c.hardware.measured, out);
  set_rates(c, total, out);
  return out;
}

}  // namespace

void StageTime::add(double n, const WorkTime& t) {
  all += n * Passes{t.forward(), t.input(), t.weight()};
  parts.compute += n * t.compute.sum();
  parts.recompute += n * t.recompute;
  parts.tp += n * t.tp.sum(), parts.cp += n * t.cp.sum(), parts.ep += n * t.ep.sum();
  flops += n * t.flops, recompute_flops += n * t.recompute_flops;
}

void StageTime::add_dp(double n, const Passes& p) {
  all += n * p;
  parts.dp += n * p.sum();
}

Prediction predict(const Case& given) {
  const Case c = checked_case(given);
  PipelineClock clock;
  return as_run(c, by_description(c, layer_range(c, own_job(c)), &clock));
}

Prediction as_run(const Case& c, Prediction out) {
  constexpr double kDryRun = 4e12;  // bytes, above the capacity of an arena
  if (const std::optional<TrainConfig> own = own_job(c); own && out.memory[out.peak_rank].peak() <= kDryRun) {
    if (std::optional<std::vector<MemoryParts>> found = own_memory(*own)) set_memory(c, *std::move(found), out);
    out.bytes = own_bytes(*own);
  }
  if (!std::isfinite(out.slowest_s) || !std::isfinite(out.memory[out.peak_rank].peak()) || !(out.step_s > 0))
    throw FieldError("hardware", "expected rates that yield a finite step time");
  return out;
}

Prediction by_description(const Case& c, const std::vector<int64_t>& layers, PipelineClock* clock) {
  const Stages s = plan_stages(c, layers, clock);
  Prediction out = predict_time(c, s);
  set_memory(c, described_memory(c, s.layers, s.pipeline), out);
  if (clock) out.bytes = described_bytes(c);
  return out;
}

}  // namespace tessera::planner
