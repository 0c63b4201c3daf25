// A pipeline whose ranks share processors: a rank that waits takes none, those that work share what there is, and each
// goes as fast as it goes beside so many others.
//
//   two ranks on one processor, F and B of one second, two micro-batches:
//   rank 0 | F0 F1........ B0........ B1
//   rank 1 |    F0.. B0......F1.. B1....
#pragma once
#include <functional>

#include "parallel/pipeline/simulate.h"

namespace tessera::planner {

// Seconds that an action takes while so many ranks of the pipeline work, itself among them; from 1 to all of them.
using SharedTime = std::function<double(const Action& action, int working)>;

// What simulate() does of ranks that each have a processor: then it gives the same times. Throws Error for a schedule
// that cannot be run to its end.
Simulation simulate_shared(const Schedule& schedule, const SharedTime& time);

}  // namespace tessera::planner
