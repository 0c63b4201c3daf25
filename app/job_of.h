// The one place where options become what the libraries are told.
#pragma once
#include "app/options.h"
#include "train/job.h"

namespace tessera {

// Presets are filled in, and of the axes what is not given follows from the number of ranks (--ranks, or an MPI job's):
// --dp does, or, when that is given, the only other axis that is not. Otherwise it is 1; with no word about ranks at
// all, two data-parallel ranks where the machine and the batch allow it. May be a mesh of another number of ranks,
// which check_plan() refuses. Throws Error (usage) for a schedule that has no such name.
Job job_of(const TrainOptions& options);
// Throws Error (usage) in the words of the options, with the nearest values that can be.
void check_plan(const TrainOptions& options);

}  // namespace tessera
