// What is wrong with a schedule, if anything.
//
// A right one has every forward pass and every backward pass (whole or split) of every stage and micro-batch once, on
// the rank that has the stage, in ascending order within a stage; every rank can go through its list to the end; and
// where there are messages, every boundary between ranks has all of its own. Cost: one walk through it.
#pragma once
#include <optional>
#include <string>

#include "parallel/pipeline/schedule.h"
#include "parallel/pipeline/walk.h"

namespace tessera {

struct ScheduleFault {
  std::string what;   // one line that names rank, action and what was expected
  ActionPlace place;  // what it is about; past the end of a list that lacks something
  std::string drawn;  // the lists of all ranks around the place, which is [marked]
};

// `in_flight`: the most stages times micro-batches that a rank may hold at once (a chunk's micro-batch counts one); 0
// for as many as there are.
std::optional<ScheduleFault> find_fault(const Schedule& schedule, int in_flight = 0);
// Throws Error that names the schedule and the fault.
void validate(const Schedule& schedule, int in_flight = 0);

// The most that each rank has in flight: forward passes without their B or W.
std::vector<int> peak_in_flight(const Schedule& schedule);

}  // namespace tessera
