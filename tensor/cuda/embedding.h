// Lookup in a table on a GPU, and its gradient. ids lie on the GPU; operands are contiguous.
#pragma once
#include "tensor/tensor.h"

namespace tessera::cuda {

void embedding(const Tensor& out, const Tensor& ids, const Tensor& table);
// sums (V, C) in the type of sums. Every row is written.
void embedding_backward(const Tensor& sums, const Tensor& dy, const Tensor& ids);

}  // namespace tessera::cuda
