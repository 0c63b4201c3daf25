// Limits of plan puzzles, derived from a known solution.
#include "lab/plan_task.h"

#include <algorithm>
#include <cmath>

#include "tensor/random.h"

namespace tessera::lab {

Settings PlannedLayout::settings() {
  Settings s = field_descriptors(all);
  s.add({"recompute_layers", &recompute_layers, {}, Field{.range = {0, 1e5}}});
  return s;
}

namespace {

// Without recomputation, and with full recomputation.
struct Ends {
  planner::Prediction none, all;
};

Ends predict_ends(const PlanTask& t, const planner::Layout& l) {
  planner::Case c = t.with;
  c.layout = l;
  c.layout.plan.recompute = Recompute::none;
  planner::Prediction none = planner::predict(c);
  c.layout = l;
  return {std::move(none), planner::predict(c)};
}

planner::Prediction blend(const PlanTask& t, const Ends& ends, int64_t layers) {
  planner::Prediction out = ends.all;
  const double fraction = static_cast<double>(layers) / static_cast<double>(t.with.model.layers);
  const auto set = [fraction](double& x, double none) { x = none + fraction * (x - none); };
  const double tokens = out.tokens_per_s * out.step_s;
  set(out.step_s, ends.none.step_s), set(out.bubble, ends.none.bubble);
  out.tokens_per_s = tokens / out.step_s;
  for (const auto& field : planner::kParts) set(out.parts.*field.second, ends.none.parts.*field.second);
  for (size_t r = 0; r < out.memory.size(); ++r)
    for (const auto& field : planner::kMemoryParts) set(out.memory[r].*field.second, ends.none.memory[r].*field.second);
  const auto peak_rank = std::ranges::max_element(out.memory, {}, &planner::MemoryParts::peak);
  out.peak_rank = static_cast<size_t>(peak_rank - out.memory.begin());
  out.fits = peak_rank->peak() <= t.with.hardware.usable_bytes();
  const auto size = [&](const auto& field) { return (*peak_rank).*field.second; };
  out.largest = std::ranges::max_element(planner::kMemoryParts, {}, size)->first;
  return out;
}

}  // namespace

planner::Prediction predict_partly(const PlanTask& t, const PlannedLayout& l) {
  return blend(t, predict_ends(t, l.all), l.recompute_layers);
}

PlanTask make_task(const PlanFamily& p, uint64_t seed) {
  const Philox random = Philox::named(seed, "plan");
  const auto pick = [&](uint64_t below, uint64_t what) { return static_cast<int64_t>(random.below(below, what)); };
  PlanTask t{{planner::ModelShape(*preset("llama2-7b")),
              {},
              planner::hardware_named("rtx4090"),
              planner::software_named("tessera")},
             64 + 16 * pick(8, 0)};
  t.with.model.context = 1024 + 128 * pick(3, 1);
  t.known.all = p.known[static_cast<size_t>(pick(p.known.size(), 2))];
  t.known.all.plan.microbatches = t.batch / t.known.all.plan.dp / t.known.all.sequences;
  // At least 5 recomputing layers, plus up to 8.
  const Ends ends = predict_ends(t, t.known.all);
  int64_t& layers = t.known.recompute_layers;
  for (layers = 5; !blend(t, ends, layers).fits && layers < kMaxLayers;) ++layers;
  layers = std::min<int64_t>(layers + pick(9, 3), kMaxLayers);
  const planner::Prediction found = blend(t, ends, layers);
  t.activations = std::ceil(found.memory[found.peak_rank].activations / 1e8) / 10;
  t.tokens_per_s = std::floor(found.tokens_per_s * 0.0099) * 100;
  return t;
}

}  // namespace tessera::lab
