// The group `strategy/`: a step of config C (4 layers, 4 heads, 128 channels, 64 tokens, batch 12, vocabulary 65) under
// every strategy of every axis, and some products of them, beside one rank's.
//
//   strategy/zero-3/fp32/2          strategy, dtype, ranks, of one thread each
//   strategy/one-rank/fp32/1        the trainer on one rank, beside a plain loop that knows no ranks
#pragma once
#include <vector>

#include "bench/ranks.h"

namespace tessera::bench {

std::vector<RankRow> strategy_rows(const Place& place);

// The group `schedule/`: a step of a pipeline under every schedule, and its bubble, which is the share of a step in
// which the mean rank does not compute: as the simulator has it with equal times, by a formula where one is known, as
// the simulator replays it with the measured times, and as it was where each rank has a processor.
//
//   schedule/zb-h1/4/8          schedule, ranks of one thread each, micro-batches of 2 sequences
//
// The model has 8 layers of 128 channels, 4 heads, 64 tokens and 256 words, in fp32.

std::vector<RankRow> schedule_rows(const Place& place);

}  // namespace tessera::bench
