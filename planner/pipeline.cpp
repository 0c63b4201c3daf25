// The whole schedule where it is short. In a long one ranks come to a rhythm, so that p micro-batches more take as much
// longer each time: where three lengths show that, the rest of it is counted and not simulated.
#include "planner/pipeline.h"

#include <algorithm>
#include <cmath>

namespace tessera::planner {
namespace {

constexpr int64_t kShort = 1 << 14;  // stages times micro-batches

double span(const std::vector<TimedAction>& list) { return list.back().end - list.front().start; }

double seconds_of(const Simulation& s, bool spans) {
  if (!spans) return s.makespan;
  double longest = 0;
  for (const auto& list : s.actions) longest = std::max(longest, span(list));
  return longest;
}

}  // namespace

Schedule schedule_with(const Plan& plan, int64_t microbatches) {
  Plan p = plan;
  p.microbatches = microbatches;
  return schedule_of(p);
}

std::vector<double> busy_of(const Plan& plan, const std::vector<int>& rank_of_stage,
                            const std::vector<StageTimes>& stages, bool split) {
  std::vector<double> busy(static_cast<size_t>(plan.pp));
  for (size_t s = 0; s < stages.size(); ++s) {
    const StageTimes& t = stages[s];
    busy[static_cast<size_t>(rank_of_stage[s])] +=
        static_cast<double>(plan.microbatches) * (t.forward + (split ? t.input + t.weight : t.backward));
  }
  return busy;
}

PipelineTime pipeline_time(const Plan& plan, const std::vector<StageTimes>& stages, double message, bool spans) {
  const int64_t p = plan.pp, m = plan.microbatches;
  const auto simulated = [&](int64_t microbatches) {
    return simulate(schedule_with(plan, microbatches), {.stages = stages, .message = message});
  };
  const int64_t few = 6 * p + m % p;
  const bool is_long = std::ssize(stages) * m > kShort && m > few + 2 * p;
  Simulation last = simulated(is_long ? few : m);
  double seconds = seconds_of(last, spans);
  if (is_long) {
    const Simulation more = simulated(few + p), most = simulated(few + 2 * p);
    const double a = seconds_of(more, spans), b = seconds_of(most, spans), step = b - a;
    if (std::abs(step - (a - seconds)) < 1e-9 * b) {
      seconds = b + step * static_cast<double>((m - few - 2 * p) / p);
    } else {
      last = simulated(m);
      seconds = seconds_of(last, spans);
    }
  }
  PipelineTime out{.seconds = seconds,
                   .busy = busy_of(plan, last.schedule.rank_of_stage, stages, last.schedule.has(Do::I)),
                   .in_flight = last.in_flight};
  double busy = 0;
  for (const double b : out.busy) busy += b;
  out.bubble = seconds > 0 ? std::max(0.0, 1 - busy / seconds / static_cast<double>(p)) : 0;
  return out;
}

}  // namespace tessera::planner
