// Dropout on a GPU: the masks of tensor/ops/dropout.h, bit for bit.
#pragma once
#include "tensor/ops/dropout.h"

namespace tessera::cuda {

// x (B, T, C) contiguous; y may be x. `tile` has its sizes; `positions` is int64 (T) on the GPU, or null for 0, 1, ...
void dropout(const Tensor& y, const Tensor& x, double p, const DropoutTile& tile, const Tensor* positions);

}  // namespace tessera::cuda
