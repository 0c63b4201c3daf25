// What a prediction is put together from, and a search's closed forms too.
#pragma once
#include <functional>
#include <vector>

#include "planner/pipeline.h"
#include "planner/predict.h"

namespace tessera::planner {

struct Pieces {
  std::vector<int64_t> layers;  // of each stage
  std::vector<int> rank_of_stage;
  std::function<PipelineTime(const std::vector<StageTimes>&, double message)> pipeline;
  std::function<std::vector<MemoryParts>(const PipelineTime&)> memory;
};
// Of a case that is checked; without bytes.
Prediction put_together(const Case& c, const Pieces& how);

}  // namespace tessera::planner
