// Lookup in a table on a GPU, and its gradient. ids lie on the GPU; operands are contiguous.
#pragma once
#include "tensor/ops/vocab_part.h"
#include "tensor/tensor.h"

namespace tessera::cuda {

void embedding(const Tensor& out, const Tensor& ids, const Tensor& table, const VocabPart& part);
// sums (V, C) in the type of sums. Every row is written.
void embedding_backward(const Tensor& sums, const Tensor& dy, const Tensor& ids, const VocabPart& part);

}  // namespace tessera::cuda
