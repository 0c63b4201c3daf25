// How long a pipeline takes, and what it holds in flight, by simulating its schedule.
#pragma once
#include <array>
#include <functional>
#include <string>
#include <tuple>
#include <vector>

#include "parallel/pipeline/simulate.h"
#include "train/plan.h"

namespace tessera::planner {

struct PipelineTime {
  double seconds = 0;               // a step's
  double bubble = 0;                // share of it in which the mean rank waits
  std::vector<double> busy = {};    // seconds, of each rank
  std::vector<int> in_flight = {};  // the most of each rank, in stages times micro-batches
  std::vector<int> waiting = {};    // the most between I and W, in the same
  int at_the_end = 1;               // the most micro-batches in flight on the last stage
};

// The time of a pass of a stage.
inline double& pass_time(StageTimes& t, PassKind what) {
  return what == PassKind::F ? t.forward : what == PassKind::B ? t.backward : what == PassKind::I ? t.input : t.weight;
}

// The rank of each stage, known without the schedule.
std::vector<int> rank_of_stages(const Plan& plan);
// As the plan says, of any number of micro-batches. Throws FieldError for numbers that do not fit.
Schedule schedule_with(const Plan& plan, int64_t microbatches);

// The times of pipelines, one after another. What schedules say is kept until others are asked for, so that plans of
// one schedule, asked for in a row, take new times alone.
//
//   a rank's list:   F0 F1 B0 B1    as it is kept: every action behind those that it needs, and where these stand
class PipelineClock {
 public:
  // The times that simulate() gives. `spans`: the next step begins on a rank when its own has ended, as where an update
  // is taken back when the norm says so (Qi et al. 2024, section 4): then a step takes as long as the longest span of a
  // rank, and not from the first start to the last end.
  PipelineTime time(const Plan& plan, const std::vector<StageTimes>& stages, double message, bool spans);

 private:
  struct Step {
    int stage;
    PassKind what;
    std::array<int, 2> needs;  // twice the place of each, and 1 where it comes from another rank; -1: none
  };
  using Name = std::tuple<ScheduleKind, std::string, int64_t, int64_t, int64_t>;
  struct Order {
    Name name = {};
    std::vector<int> rank_of_stage = {};
    std::vector<Step> steps = {};
    PipelineTime kept = {};  // what the schedule keeps between passes
    double seconds(const std::vector<StageTimes>& stages, double message, bool spans) const;
  };
  const Order& sort_key(const Plan& plan, int64_t microbatches);
  std::vector<Order> last_ = {};  // at most two
};
// The same by closed forms (parallel/pipeline/schedules.h), within a few percent.
PipelineTime pipeline_formula(const Plan& plan, const std::vector<StageTimes>& stages, double message, bool spans);

// A pipeline whose ranks share processors: a rank that waits takes none, those that work share what there is, and each
// goes as fast as it goes beside so many others.
//
//   two ranks on one processor, F and B of one second, two micro-batches:
//   rank 0 | F0 F1........ B0........ B1
//   rank 1 |    F0.. B0......F1.. B1....

// Seconds that an action takes while so many ranks of the pipeline work, itself among them; from 1 to all of them.
using SharedTime = std::function<double(const Action& action, int working)>;

// Simulates a schedule as simulate() does for ranks that each have a processor: then it gives the same times. Throws
// Error for a schedule that cannot be run to its end.
Simulation simulate_shared(const Schedule& schedule, const SharedTime& time);

}  // namespace tessera::planner
