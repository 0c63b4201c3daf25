// Simulates a schedule: step time and activations in flight.
#pragma once
#include <array>
#include <cstdint>
#include <functional>
#include <string>
#include <tuple>
#include <vector>

#include "parallel/pipeline/simulate.h"
#include "train/plan.h"

namespace tessera::planner {

struct PipelineTime {
  double seconds = 0;
  double bubble = 0;                // idle fraction of the mean rank
  std::vector<double> busy = {};    // seconds per rank
  std::vector<int> in_flight = {};  // maximum per rank, in stages x micro-batches
  std::vector<int> waiting = {};    // maximum between I and W per rank, in the same unit
  int in_flight_last_stage = 1;     // maximum of micro-batches on the last stage
};

inline double& pass_time(StageTimes& t, PassKind what) {
  return what == PassKind::F ? t.forward : what == PassKind::B ? t.backward : what == PassKind::I ? t.input : t.weight;
}

// The rank of each stage; builds the schedule only if it is in a file.
std::vector<int> rank_of_stages(const Plan& plan);
// Throws FieldError if the schedule does not support this number of micro-batches.
Schedule schedule_with(const Plan& plan, int64_t microbatches);

// Caches the last two schedules as topologically sorted actions, so consecutive plans of one schedule only need new
// times.
class PipelineClock {
 public:
  // Same result as simulate(). With `spans`, a rank begins the next step as soon as its own step ends, as with
  // post-update validation of the norm (Qi et al. 2024, section 4): the step time is the longest span of a rank, not
  // the time from the first start to the last end.
  PipelineTime time(const Plan& plan, const std::vector<StageTimes>& stages, double message, bool spans);

 private:
  struct Step {
    int stage;
    PassKind what;
    std::array<int, 2> needs;  // 2 x index of a dependency, + 1 if on another rank; -1: none
  };
  using Name = std::tuple<ScheduleKind, std::string, int64_t, int64_t, int64_t>;
  struct Order {
    Name name = {};
    std::vector<int> rank_of_stage = {};
    std::vector<Step> steps = {};
    PipelineTime activations = {};  // in flight
    double seconds(const std::vector<StageTimes>& stages, double message, bool spans) const;
  };
  const Order& find_order(const Plan& plan, int64_t microbatches);
  std::vector<Order> last_ = {};  // at most two
};
// Closed forms (parallel/pipeline/schedules.h), within a few percent of PipelineClock.
PipelineTime pipeline_formula(const Plan& plan, const std::vector<StageTimes>& stages, double message, bool spans);

// Running ranks share the CPU cores, so their speed depends on how many run at the same time.
//
//   two ranks on one core, F and B of one second, two micro-batches:
//   rank 0 | F0 F1........ B0........ B1
//   rank 1 |    F0.. B0......F1.. B1....

// Seconds of an action while `working` ranks (including this one) are running.
using SharedTime = std::function<double(const Action& action, int working)>;

// simulate() for ranks that share cores; identical if `time` ignores `working`. Throws Error on deadlock.
Simulation simulate_shared(const Schedule& schedule, const SharedTime& time);

}  // namespace tessera::planner
