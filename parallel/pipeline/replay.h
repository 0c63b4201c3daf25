// A step of a pipeline that was measured: as a picture beside the simulator's, and as times to feed the simulator with.
//
//   measured:  Simulation happened = as_measured(schedule, lists)
//   replayed:  Simulation clock = simulate(schedule, times_of(schedule, lists))
//
// Every pass is replayed with its own length and not with the mean of its kind: the first micro-batch of a step finds
// its weights outside of the caches and its gradients unwritten, and with few micro-batches that is much of the step.
#pragma once
#include <vector>

#include "parallel/pipeline/simulate.h"

namespace tessera {

// [rank][time]: what was done and when, messages among it, on one clock.
using TimedLists = std::vector<std::vector<TimedAction>>;

// The measured step, on a clock that begins with the first pass of a stage. All time outside passes is idle, messages
// too.
Simulation as_measured(const Schedule& schedule, TimedLists lists);

// The message that a receive action takes, as the action that sends it.
Action sent_as(const Action& received);

// The time of each pass, the means of each stage, and the mean time of a message from when both sides were ready (0 if
// there is none).
Times times_of(const Schedule& schedule, const TimedLists& lists);

}  // namespace tessera
