// The one place where options become what the libraries are told.
#pragma once
#include "app/options.h"
#include "parallel/comm/launch.h"
#include "train/job.h"

namespace tessera {

// Presets are filled in, and of the axes what is not given follows from the number of ranks (--ranks, or an MPI job's):
// --dp does, or, when that is given, the only other axis that is not. Otherwise it is 1; with no word about ranks at
// all, two data-parallel ranks where the machine and the batch allow it. May be a mesh of another number of ranks,
// which check_plan() refuses. Throws Error (usage) for a schedule that has no such name.
Job job_of(const TrainOptions& options);
// How the ranks of a command are started. Processes must have been given the same command, the same options (but for
// what is said to the user) and the same program.
LaunchOptions ranks_of(const std::string& command, const TrainOptions& options, const Plan& plan);
// Throws Error (usage) in the words of the options, with the nearest values that can be.
void check_plan(const TrainOptions& options);

}  // namespace tessera
