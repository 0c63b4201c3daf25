// The check of a schedule, and its fault if it has one.
//
// A right one has every forward pass and every backward pass (whole or split) of every stage and micro-batch once, on
// the rank that has the stage, in ascending order within a stage; every rank can go through its list to the end; and
// where there are messages, every boundary between ranks has all of its own. Cost: one walk through it.
#pragma once
#include <optional>
#include <string>
#include <vector>

#include "parallel/pipeline/schedule.h"

namespace tessera {

// One line that names rank, action and what was expected.
std::optional<std::string> find_fault(const Schedule& schedule);
// Throws Error that names the schedule and the fault.
void validate(const Schedule& schedule);

// The most that each rank has in flight: forward passes without their B or W (a chunk's micro-batch counts one).
std::vector<int> peak_in_flight(const Schedule& schedule);

}  // namespace tessera
