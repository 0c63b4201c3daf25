// Plans to find: a learner's seed decides the model's context, the batch and the limits. A part of the layers
// recomputes, which no plan of the planner has, so that its list has no answer.
#pragma once
#include <cstdint>
#include <vector>

#include "planner/predict.h"
#include "settings/setting.h"

namespace tessera::lab {

// What the tasks of a puzzle have in common.
struct PlanFamily {
  ZeroStage zero;                      // at most
  int64_t pp;                          // at most
  std::vector<planner::Layout> known;  // plans among which a seed's is found
};

// At least so many layers recompute, and at most so many.
inline constexpr int64_t kMinLayers = 4, kMaxLayers = 28;

// Of the layers, `recompute_layers` recompute what the plan specifies; the others keep all activations.
struct PlannedLayout {
  planner::Layout all = {};
  int64_t recompute_layers = 0;
  Settings settings();
};

struct PlanTask {
  planner::Case with;  // without a layout
  int64_t batch = 0;   // sequences of a step
  double activations = 0, tokens_per_s = 0;
  PlannedLayout known = {};  // solves it
};

// Interpolates linearly between the prediction without recomputation and the one where all layers recompute.
planner::Prediction predict_partly(const PlanTask& task, const PlannedLayout& layout);

PlanTask make_task(const PlanFamily& family, uint64_t seed);

}  // namespace tessera::lab
