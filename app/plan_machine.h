// This machine as the planner knows it: what was measured here and kept, or is measured now.
#pragma once
#include <memory>
#include <optional>

#include "planner/machine.h"
#include "train/job.h"

namespace tessera {

// What is kept, in one line: nothing where this machine has not been measured. A file that is damaged, or of another
// machine, is as none.
std::shared_ptr<const planner::Machine> kept_here();
// It, measured where there is none or where it shall be `again`; standard error says what is done and why.
std::shared_ptr<const planner::Machine> measured_here(bool again);
// The figures that a person looks for first, and where the others are.
std::string machine_words(const planner::Machine& machine);

// Seconds of the job's step; nothing for a run that was not measured: on GPUs, of processes, without steps in common.
std::optional<double> predicted_step(const planner::Machine& machine, const Job& job);

}  // namespace tessera
