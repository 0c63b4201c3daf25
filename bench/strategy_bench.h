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

}  // namespace tessera::bench
