// What a trace says of one step: which step stands for the run, and its pipeline beside the plans for it.
#pragma once
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "app/report/record.h"
#include "parallel/pipeline/simulate.h"

namespace tessera::report {

// A step of the trace as all ranks together see it. 0 where the trace has none.
struct StepSpan {
  int64_t step = 0;
  double begin = 0, end = 0;  // milliseconds
};
// The step that took the median time.
StepSpan median_step(const Record& record);

// What all ranks together sent in a step, by axis and operation, and how long a rank was in it on average.
struct SentInStep {
  std::string axis, operation;
  int64_t calls = 0, bytes = 0;
  int64_t most = 0;  // bytes of the busiest rank; 0: not known
  double ms = 0;
};
std::vector<SentInStep> sent_in_step(const Record& record, const StepSpan& step);

// One pipeline of ranks (those that differ from rank 0 along pp only) in one step.
struct MeasuredPipeline {
  Times times;          // of each pass and of a message, in milliseconds; see below
  Simulation equal;     // the plan where F, I and W take equally long
  Simulation replayed;  // the plan on the measured times
  Simulation measured;  // what happened; messages among it
  std::optional<double> formula;
};
// Where ranks share cores, the times are those for which each pass had a processor, and messages take none: what a rank
// with a processor for itself would need. Nothing where there is no pipeline, or where the trace lacks actions of the
// schedule.
std::optional<MeasuredPipeline> measure_pipeline(const Record& record, const StepSpan& step);

}  // namespace tessera::report
