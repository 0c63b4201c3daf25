// A step put together: passes of the stages, the pipeline's schedule, the data axis, the optimizer.
//
//   step = the busiest rank's passes + its waiting in the pipeline + what is seen of the data axis + the update
//
// Of a rank's passes compute, recomputation and the axes tp, cp and ep are parts by themselves; what is seen of
// ZeRO-3's gathering belongs to dp.
#include "planner/predict.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <utility>

#include "planner/check_case.h"
#include "planner/described.h"
#include "planner/layer.h"
#include "planner/own.h"
#include "planner/pipeline.h"
#include "planner/predict_measured.h"
#include "tensor/error.h"

namespace tessera::planner {
namespace {

double real(int64_t x) { return static_cast<double>(x); }

// What one stage takes for one micro-batch, by part.
struct StageWork {
  Passes all = {};
  Parts parts = {};
  double flops = 0, again = 0;

  void add(double n, const LayerTime& t) {
    all += n * Passes{t.forward(), t.input(), t.weight()};
    parts.compute += n * t.compute.sum();
    parts.recompute += n * t.recompute;
    parts.tp += n * t.tp.sum(), parts.cp += n * t.cp.sum(), parts.ep += n * t.ep.sum();
    flops += n * t.flops, again += n * t.again;
  }
  void add_dp(double n, const Passes& p) {
    all += n * p;
    parts.dp += n * p.sum();
  }
};

// Rajbhandari et al. 2020, section 5: with ZeRO-3 a layer's parameters are gathered for each pass, beside the layer
// before it, and its gradient is scattered beside the next; with ZeRO-2 gradients are scattered for each micro-batch.
Passes sharing_of_layer(const Case& c, const LayerTime& layer) {
  const Software& s = c.software;
  const Link link = link_of(c.hardware, data_axis(c));
  const ZeroStage zero = c.layout.plan.zero;
  if (link.ranks == 1 || zero < ZeroStage::two) return {};
  const double size = parameters_of(c, 1, false, false).all();
  const double gather = zero == ZeroStage::three ? all_gather_s(link, size * s.gather_bytes) : 0,
               scatter = all_gather_s(link, size * s.reduce_bytes), again = s.reshard_after_forward ? gather : 0;
  if (!s.dp_overlap) return {gather, again + scatter, 0};
  const auto seen = [&](double sent, double beside) {
    const double hidden = std::min(sent, beside);
    return sent - hidden + c.hardware.contention * hidden;
  };
  return {seen(gather, layer.forward()), seen(again + scatter, layer.input() + layer.weight()), 0};
}

// Of a stage's gradients and parameters, once in a step: beside the last backward pass, and the first forward pass of
// the next step (Li et al. 2020, "PyTorch Distributed").
double sharing_of_step(const Case& c, double held, const Passes& passes) {
  const Software& s = c.software;
  const Hardware& h = c.hardware;
  const Link link = link_of(h, data_axis(c));
  const ZeroStage zero = c.layout.plan.zero;
  if (link.ranks == 1 || zero == ZeroStage::three) return 0;
  const double sums = zero == ZeroStage::none  ? all_reduce_s(h, link, held * s.reduce_bytes)
                      : zero == ZeroStage::one ? all_gather_s(link, held * s.reduce_bytes)
                                               : 0;
  const double values = zero == ZeroStage::none ? 0 : all_gather_s(link, held * s.gather_bytes);
  if (!s.dp_overlap) return sums + values;
  const double beside = std::min(sums, passes.backward()), before = std::min(values, passes.forward);
  return sums + values - (1 - h.contention) * (beside + before);
}

// Gradients are read for their norm, and all of a parameter's state is read and written once.
double update_s(const Case& c, double held) {
  const Software& s = c.software;
  const double n = c.layout.plan.zero == ZeroStage::none ? 1 : real(data_axis(c).ranks);
  return bytes_s(c.hardware, held / n * (2 * s.state_bytes + 3 * s.gradient_bytes + s.parameter_bytes));
}

std::string largest_of(const MemoryParts& m) {
  const std::array<std::pair<double, const char*>, 6> all{{{m.parameters, "parameters"},
                                                           {m.gradients, "gradients"},
                                                           {m.optimizer, "optimizer"},
                                                           {m.activations, "activations"},
                                                           {m.communication, "communication"},
                                                           {m.workspace, "workspace"}}};
  return std::ranges::max_element(all)->second;
}

// Chowdhery et al. 2022, appendix B: 6 N + 12 L q s for a token, N without tables that are only looked up; of experts
// those that see the token.
double model_flops_of_token(const ModelShape& m) {
  const double idle = parameters(m) - active_parameters(m);
  const double matrices = real(m.layers) * layer_parameters(m) - idle + real(m.vocab) * real(m.channels);
  return 6 * matrices + 12 * real(m.layers) * real(m.query()) * real(m.context);
}

void set_rates(const Case& c, const StageWork& all, Prediction& out) {
  const double tokens = real(c.layout.batch()) * real(c.model.context), ranks = real(c.layout.plan.ranks());
  const double each = model_flops_of_token(c.model) * tokens / ranks;
  out.fastest_s = out.step_s * c.hardware.range_fastest;
  out.slowest_s = out.step_s * c.hardware.range_slowest;
  out.tokens_per_s = tokens / out.step_s;
  out.tflops_per_rank = each / out.step_s / 1e12;
  out.mfu = each / out.step_s / c.hardware.peak_flops;
  out.hfu = out.mfu * (1 + (all.flops > 0 ? all.again / all.flops / 3 : 0));
}

void set_memory(const Case& c, std::vector<MemoryParts> memory, Prediction& out) {
  out.memory = std::move(memory);
  const auto fullest = std::ranges::max_element(out.memory, {}, &MemoryParts::peak);
  out.fullest = static_cast<size_t>(fullest - out.memory.begin());
  const double over = fullest->peak() - (c.hardware.memory_bytes - c.hardware.reserved_bytes);
  out.fits = over <= 0;
  out.over_bytes = std::max(0.0, over);
  out.largest = largest_of(*fullest);
}

// Every stage's passes, and the pipeline that they make.
struct Stages {
  std::vector<int64_t> layers = {};
  std::vector<int> rank = {};
  std::vector<StageWork> work = {};
  std::vector<StageTimes> times = {};
  double message_s = 0;
  PipelineTime pipeline = {};
};

Stages stages_of(const Case& c, const std::vector<int64_t>& layers, bool simulated) {
  const Plan& p = c.layout.plan;
  const LayerTime layer = layer_time(c), embedding = embedding_time(c), head = head_time(c);
  const Passes shared = sharing_of_layer(c, layer);
  Stages s{.layers = layers, .rank = rank_of_stages(p)};
  const double array = 2 * local_tokens(c) * real(c.model.channels),
               parts = p.sp || c.software.scatter_messages ? real(p.tp) : 1;
  const double message = p.pp > 1 ? message_s(c.hardware, pp_axis(c), array / parts) : 0;
  const double waited = c.software.pp_overlap ? 0 : message;
  s.message_s = message - waited;
  for (size_t i = 0; i < layers.size(); ++i) {
    StageWork& w = s.work.emplace_back();
    w.add(real(layers[i]), layer);
    w.add_dp(real(layers[i]), shared);
    if (i == 0) w.add(1, embedding);
    if (i + 1 == layers.size()) w.add(1, head);
    const Passes& t = w.all;
    s.times.push_back({t.forward + waited, t.backward() + waited, t.input + waited, t.weight});
  }
  const bool spans = c.software.name != "tessera" && splits_backward(p.schedule);
  s.pipeline = (simulated ? pipeline_time : pipeline_formula)(p, s.times, s.message_s, spans);
  return s;
}

// Time; the update and the data axis are those of the busiest rank.
Prediction time_of(const Case& c, const Stages& s) {
  const double m = real(c.layout.plan.microbatches);
  const auto busiest = std::ranges::max_element(s.pipeline.busy) - s.pipeline.busy.begin();
  Prediction out;
  double held = 0;
  Passes once;
  StageWork whole;
  for (size_t i = 0; i < s.work.size(); ++i) {
    whole.flops += s.work[i].flops, whole.again += s.work[i].again;
    if (s.rank[i] != busiest) continue;
    const Parts& w = s.work[i].parts;
    out.parts.compute += m * w.compute, out.parts.recompute += m * w.recompute, out.parts.tp += m * w.tp;
    out.parts.cp += m * w.cp, out.parts.ep += m * w.ep, out.parts.dp += m * w.dp;
    held += parameters_of(c, s.layers[i], i == 0, i + 1 == s.work.size()).all();
    once += s.work[i].all;
  }
  out.parts.bubble = std::max(0.0, s.pipeline.seconds - out.parts.sum());
  out.parts.dp += sharing_of_step(c, held, once);
  out.parts.optimizer = update_s(c, held);
  out.step_s = out.parts.sum();
  out.bubble = s.pipeline.bubble;
  out.stages = s.times;
  out.message_s = s.message_s;
  if (c.hardware.measured) set_measured_times(c, *c.hardware.measured, out);
  set_rates(c, whole, out);
  return out;
}

}  // namespace

Prediction predict(const Case& given) {
  const Case c = checked_case(given);
  std::optional<Job> own = own_job(c);
  const int64_t count = std::ssize(rank_of_stages(c.layout.plan));
  const Stages s = stages_of(c, own ? own_layers(*own) : layers_of_stages(c, count), true);
  Prediction out = time_of(c, s);
  set_memory(c, described_memory(c, s.pipeline.in_flight), out);
  constexpr double kDryRun = 4e12;  // bytes: more than an arena has
  if (out.memory[out.fullest].peak() > kDryRun) own.reset();
  if (own)
    if (std::optional<std::vector<MemoryParts>> found = own_memory(*own)) set_memory(c, *std::move(found), out);
  out.bytes = own ? own_bytes(*own) : described_bytes(c);
  if (!std::isfinite(out.slowest_s) || !std::isfinite(out.memory[out.fullest].peak()) || !(out.step_s > 0))
    throw FieldError("hardware", "expected rates with which a step takes a finite time");
  return out;
}

Prediction by_description(const Case& c, const std::vector<int64_t>& layers, bool simulated) {
  const Stages s = stages_of(c, layers, simulated);
  Prediction out = time_of(c, s);
  set_memory(c, described_memory(c, s.pipeline.in_flight), out);
  if (simulated) out.bytes = described_bytes(c);
  return out;
}

}  // namespace tessera::planner
