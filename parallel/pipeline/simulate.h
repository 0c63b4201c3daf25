// Simulation of a schedule, and its text diagram:
//
//   Simulation s = simulate(one_f_one_b(3, 4));
//   std::puts(draw(s).c_str());
//
//   rank 0 | F0 F1 F2 .. .. .. .. B0 -- F3 B1 -- .. B2 -- .. B3 --
//   rank 1 | .. F0 F1 .. .. B0 -- F2 B1 -- F3 B2 -- .. B3 -- .. ..
//   rank 2 | .. .. F0 B0 -- F1 B1 -- F2 B2 -- F3 B3 -- .. .. .. ..
//
// An action begins when the previous action of its rank has ended and its inputs are available. A value sent to another
// rank arrives `message` seconds after it was computed (or sent, if the schedule has messages); sending takes no time.
#pragma once
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "parallel/pipeline/schedule.h"

namespace tessera {

struct StageTimes {
  double forward = 1, backward = 2, input = 1, weight = 1;
};

struct Times {
  std::vector<StageTimes> stages = {StageTimes{}};  // one per stage, or one for all
  double message = 0;
  std::map<Action, double> actions = {};  // overrides for individual actions
};

struct TimedAction {
  Action action;
  double start = 0, end = 0;
};

struct Simulation {
  Schedule schedule;
  std::vector<std::vector<TimedAction>> actions = {};  // [rank][time]
  double makespan = 0;                                 // from the first start, at 0, to the end of the last pass
  std::vector<double> idle = {};                       // of each rank, within the makespan
  std::vector<double> idle_inside = {};                // of each rank, from its first start to its last end
  std::vector<int> in_flight = {};                     // of each rank, in (stage, micro-batch) pairs

  void sum_up();                   // computes the fields above from the schedule and the actions
  double bubble_fraction() const;  // mean over ranks of idle / makespan
};

// Throws Error if the schedule deadlocks or the number of times does not match its stages.
Simulation simulate(const Schedule& schedule, const Times& times = {});

// bubble_fraction() in closed form for equal F, I and W and zero-cost messages (Huang et al. 2019, Narayanan et al.
// 2021, Qi et al. 2024). Empty if no formula is known.
std::optional<double> bubble_formula(const Schedule& schedule);

// One row per rank. A column represents `unit` seconds (0: the shortest action), or more if the diagram would exceed
// `columns` columns (0: unlimited), and shows the action at its midpoint. Stage numbers are omitted if each rank has
// one stage.
std::string draw(const Simulation& simulation, double unit = 0, int columns = 0);

// One row per rank, to scale: `columns` characters represent `span` seconds (0: the makespan). A pass begins with its
// name, or its pass letter if the name does not fit; a pass shorter than half a character may be missing. Later stages
// of a rank use lower case; names include the stage only if a rank has more than two.
//
//   rank 0 |F0--F1--........B0------F2--B1------....B2------|
//   rank 1 |....F0--B0------F1--B1------F2--B2------........|
std::string draw_to_scale(const Simulation& simulation, double span = 0, int columns = 100);

// A measured pipeline step, as a diagram and as times for the simulator:
//
//   Simulation measured = as_measured(schedule, lists);
//   Simulation replayed = simulate(schedule, simulate_times(schedule, lists));
//
// Every pass is replayed with its measured duration, not the mean of its kind: the first micro-batch of a step has cold
// caches and unwritten gradients, a large fraction of a step with few micro-batches.

// [rank][time]: measured actions, including messages, on one clock.
using TimedLists = std::vector<std::vector<TimedAction>>;

// Time 0 is the start of the first pass. All time outside passes, including messages, is idle.
Simulation as_measured(const Schedule& schedule, TimedLists lists);

Action sent_as(const Action& received);

// The time of each pass, the mean times of each stage, and the mean time of a message from when both sides are ready.
Times simulate_times(const Schedule& schedule, const TimedLists& lists);

}  // namespace tessera
