// A GPT whose stages are timed: all of them on one rank, one after another, or each on its own rank of a pipeline.
#pragma once
#include <cstdint>
#include <vector>

#include "models/language_model.h"
#include "parallel/pipeline/schedule.h"
#include "parallel/pipeline/simulate.h"

namespace tessera {

struct PipelineCase {
  ModelConfig model;
  int64_t sequences = 1;  // of a micro-batch
  int rounds = 5;
  int64_t activation_bytes() const { return sequences * model.context * model.channels * 4; }
};

// Of each number of stages, the processor's time that its stages take for a micro-batch on one thread: medians over the
// rounds, in which the numbers of stages, and backward passes whole and split, take turns. The first micro-batch of a
// step, whose gradients are not added to others, is left out.
std::vector<std::vector<StageTimes>> time_stages(const PipelineCase& what, const std::vector<int>& stages);

// Of a schedule, on ranks that are threads: medians over the rounds.
struct PipelineRun {
  double seconds = 0;   // from the first pass of a step to the end of the last
  double bubble = 0;    // share of that time in which ranks did not compute
  double replayed = 0;  // the same on the simulated clock, fed with the time of every pass of the same step
};
// Schedules of one number of ranks and micro-batches; they take turns.
std::vector<PipelineRun> run_pipelines(const PipelineCase& what, const std::vector<Schedule>& schedules);

}  // namespace tessera
