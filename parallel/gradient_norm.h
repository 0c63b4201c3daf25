// The sums of squares that the global gradient norm is made of, of gradients that ranks share out.
//
// Their order is that of optim/grad_norm.h whoever keeps what: ranks that keep parts of a unit exchange the sums of its
// blocks, which no part cuts, and each adds them up as if it had the unit.
#pragma once

#include "parallel/data_strategy.h"

namespace tessera {

// Sums of squares of each unit's gradients: float64 (units), where the shards are, so that nobody waits for a GPU (but
// for parameter servers, whose numbers are added on the host). DataParallel's are still to be added up over ranks.
//
// `beside`, where it has several ranks, is an axis over which parameters are cut. Then the numbers are of this rank's
// shards alone, in another order, and are to be added up over both axes (but over the strategy's shard_axis() where
// every rank has all of each unit's). What every rank of `beside` has counts on its first.
Tensor unit_squares(const DataStrategy& strategy, const Communicator* beside = nullptr);
// The same, added up: the same bits on every rank. Every rank calls it.
std::vector<double> unit_sums(const DataStrategy& strategy, Communicator* beside = nullptr);

}  // namespace tessera
