// Sums of squares for the global norm of sharded gradients.
//
// For every sharding the summation order is that of optim/grad_norm.h: ranks exchange the sums of norm blocks, which no
// shard splits, and each rank adds them in the order of the full unit.
#pragma once
#include <cstddef>
#include <functional>
#include <vector>

#include "optim/exact_norm.h"
#include "parallel/data_strategy.h"

namespace tessera {

// Sums of squares of each unit's gradients: float64 (units), on the device of the shards, without host synchronization
// (except with parameter servers, which add on the host). DataParallel's sums are not yet reduced over ranks.
//
// If `parameter_axis`, which shards parameters, has several ranks, the sums cover only this rank's shards, in a
// different order, and must be summed over both axes (only over `parameter_axis` if every rank has each unit's full
// gradients). Tensors replicated over `parameter_axis` count on its first rank.
Tensor unit_squares(const DataStrategy& strategy, const Communicator* parameter_axis = nullptr);
// Summed over ranks and bitwise identical on every rank. Collective.
std::vector<double> unit_sums(const DataStrategy& strategy, Communicator* parameter_axis = nullptr);

// Squares of the elements that this rank counts: each element of the full gradients is counted by one rank of the axes
// pp, data and `parameter_axis`. `counted` selects units by index in shards(). Without experts and owners.
ExactSum exact_squares(const DataStrategy& s, const Communicator& parameter_axis,
                       const std::function<bool(size_t unit)>& counted);

}  // namespace tessera
