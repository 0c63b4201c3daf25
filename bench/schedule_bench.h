// The group `schedule/`: a step of a pipeline under every schedule, and its bubble, which is the share of a step in
// which the mean rank does not compute: as the simulator has it with equal times, by a formula where one is known, as
// the simulator replays it with the measured times, and as it was where each rank has a processor.
//
//   schedule/zb-h1/4/8          schedule, ranks of one thread each, micro-batches of 2 sequences
//
// The model has 8 layers of 128 channels, 4 heads, 64 tokens and 256 words, in fp32.
#pragma once
#include <vector>

#include "bench/ranks.h"

namespace tessera::bench {

std::vector<RankRow> schedule_rows(const Place& place);

}  // namespace tessera::bench
