// Tasks of plan puzzles: the seed determines context length, batch and limits. Only some layers recompute, which `plan`
// does not support, so its ranking contains no solution.
#pragma once
#include <cstdint>
#include <vector>

#include "base/setting.h"
#include "planner/predict.h"

namespace tessera::lab {

struct PlanFamily {
  ZeroStage zero;                      // upper bound
  int64_t pp;                          // upper bound
  std::vector<planner::Layout> known;  // candidate solutions
};

// Number of layers that recompute.
inline constexpr int64_t kMinLayers = 4, kMaxLayers = 28;

// `recompute_layers` layers recompute as the plan specifies; the others save all activations.
struct PlannedLayout {
  planner::Layout all = {};
  int64_t recompute_layers = 0;
  Settings settings();
};

struct PlanTask {
  planner::Case with;  // without a layout
  int64_t batch = 0;   // sequences per step
  double activations = 0, tokens_per_s = 0;
  PlannedLayout known = {};  // a solution
};

// Interpolates linearly between no recomputation and recomputation in all layers.
planner::Prediction predict_partly(const PlanTask& task, const PlannedLayout& layout);

PlanTask make_task(const PlanFamily& family, uint64_t seed);

}  // namespace tessera::lab
