// A small model that graders train, under a plan and on one rank.
#pragma once
#include <functional>

#include "lab/compare.h"
#include "train/trainer.h"

namespace tessera::lab {

// Two layers, whose sizes two and three tensor ranks divide, 12 sequences in a step.
Job small_job(const Plan& plan);
// The same sequences on one rank, cut into as many micro-batches as all ranks together have.
Job one_rank(Job job);
// A Trainer on each rank.
void on_ranks_of(const Job& job, const std::function<void(Trainer& trainer, int rank)>& body);

}  // namespace tessera::lab
