// The sums over ranks and micro-batches that the oracle makes, with plain loops.
#pragma once
#include <vector>

#include "parallel/comm/algorithms.h"
#include "parallel/data_layout.h"

namespace tessera {

// total += x, each element rounded to their dtype.
void add_to(const Tensor& total, const Tensor& x);
// The elements of `reduced` of the sum of the ranks' arrays, in the order in which the algorithm adds them.
void sum_in_order(const std::vector<Tensor>& ranks, const Tensor& out, const Reduced& reduced, Algorithm algorithm);
// The sum over ranks of arrays in a row, made as these collectives make it.
Tensor sum_over(const std::vector<Tensor>& ranks, const std::vector<Reduced>& reductions, Algorithm algorithm);

}  // namespace tessera
