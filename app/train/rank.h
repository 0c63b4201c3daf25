// The ranks of the command `train`.
#pragma once

#include "app/options.h"
#include "train/run/run.h"

namespace tessera {

// Read-only and shared by the ranks of a process, except for the run directory, which rank 0 writes.
struct TrainCall {
  const TrainCommand& command;
  const Dataset& dataset;
  const RunDirectory& directory;
  const Sequences& sequences;
};

// One rank of a run, with its output; returns the exit status.
int train_rank(const TrainCall& call, Communicator& world);

}  // namespace tessera
