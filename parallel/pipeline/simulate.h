// A schedule on a made-up clock, and its picture.
//
//   Simulation s = simulate(one_f_one_b(3, 4));
//   std::puts(draw(s).c_str());
//
//   rank 0 | F0 F1 F2 .. .. .. .. B0 -- F3 B1 -- .. B2 -- .. B3 --
//   rank 1 | .. F0 F1 .. .. B0 -- F2 B1 -- F3 B2 -- .. B3 -- .. ..
//   rank 2 | .. .. F0 B0 -- F1 B1 -- F2 B2 -- F3 B3 -- .. .. .. ..
//
// Each rank goes through its list. An action begins when the one before it on its rank has ended and its inputs are
// there. A value that crosses from one rank to another arrives `message` seconds after it was made (or sent, if the
// schedule has messages); sending takes its rank no time.
#pragma once
#include <map>
#include <optional>

#include "parallel/pipeline/schedule.h"

namespace tessera {

// Seconds that a stage takes for one micro-batch.
struct StageTimes {
  double forward = 1, backward = 2, input = 1, weight = 1;
};

struct Times {
  std::vector<StageTimes> stages = {StageTimes{}};  // one for each, or one for all
  double message = 0;
  std::map<Action, double> actions = {};  // times of single actions, where they are known; else their stage's
};

struct TimedAction {
  Action action;
  double start = 0, end = 0;
};

struct Simulation {
  Schedule schedule;
  std::vector<std::vector<TimedAction>> actions = {};  // [rank][time]
  double makespan = 0;                                 // from the first start, which is 0, to the last end of a pass
  std::vector<double> idle = {};                       // idle time of each rank, within the makespan
  std::vector<double> idle_inside = {};                // idle time of each rank between its first start and last end
  std::vector<int> in_flight = {};                     // the most of each rank, in stages times micro-batches

  void sum_up();                // all of the above from the schedule and the actions
  double bubble_share() const;  // idle / makespan of the mean rank
};

// Throws Error for a schedule that cannot be run to its end, or when the times are not for its stages.
Simulation simulate(const Schedule& schedule, const Times& times = {});

// The formula for bubble_share() if F, I and W take equally long and messages no time: Huang et al. 2019, Narayanan
// et al. 2021, Qi et al. 2024. Nothing where no formula is known.
std::optional<double> bubble_formula(const Schedule& schedule);

// One row for each rank. A column is `unit` seconds (0: the shortest action); a picture of more than `columns` of them
// (0: any number) takes a longer unit. A column shows the action at its middle, or dots if there is
// none. Names of stages are left out where each rank has one.
std::string draw(const Simulation& simulation, double unit = 0, int columns = 0);

// One row for each rank, in which lengths are to scale: `columns` characters are `span` seconds (0: the makespan). A
// pass begins with its name, or the letter of what it does where there is no room for the name, and goes on with
// dashes; dots are idle time. A pass shorter than half a character may be missing. Passes of a rank's later stages have
// small letters, and a name has its stage only where a rank has more than two.
//
//   rank 0 |F0--F1--........B0------F2--B1------....B2------|
//   rank 1 |....F0--B0------F1--B1------F2--B2------........|
std::string draw_to_scale(const Simulation& simulation, double span = 0, int columns = 100);

// A step of a pipeline that was measured: as a picture beside the simulator's, and as times to feed the simulator with.
//
//   measured:  Simulation happened = as_measured(schedule, lists)
//   replayed:  Simulation clock = simulate(schedule, simulate_times(schedule, lists))
//
// Every pass is replayed with its own length and not with the mean of its kind: the first micro-batch of a step finds
// its weights outside of the caches and its gradients unwritten, and with few micro-batches that is much of the step.

// [rank][time]: what was done and when, messages among it, on one clock.
using TimedLists = std::vector<std::vector<TimedAction>>;

// The measured step, on a clock that begins with the first pass of a stage. All time outside passes is idle, messages
// too.
Simulation as_measured(const Schedule& schedule, TimedLists lists);

// The message that a receive action takes, as the action that sends it.
Action sent_as(const Action& received);

// The time of each pass, the means of each stage, and the mean time of a message from when both sides were ready (0 if
// there is none).
Times simulate_times(const Schedule& schedule, const TimedLists& lists);

}  // namespace tessera
