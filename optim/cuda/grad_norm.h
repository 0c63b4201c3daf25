// The gradient norm on a GPU, by the same blocks and in the same order as on the CPU.
#pragma once
#include <span>

#include "optim/grad_norm.h"

namespace tessera::cuda {

// As the functions of optim/grad_norm.h. Queued on the stream of the tensors' arena.
void block_sums(const Tensor& grads, const Tensor& sums);
// As sums_of_squares(), of at least one tensor on one GPU, left there: float64 (tensors).
Tensor sums_of_squares(std::span<const Tensor> tensors);
// To float64 `out`, one number for each run.
void ordered_sums(const Tensor& sums, std::span<const BlockRun> runs, const Tensor& out);

}  // namespace tessera::cuda
