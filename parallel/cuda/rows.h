// Rows of a table on a GPU that are chosen by number.
#pragma once
#include "tensor/tensor.h"

namespace tessera::cuda {

// Row k of `few` to row places[k] of `all`, or back. Both (..., C), contiguous and of one dtype; places int64, each
// once.
void spread_rows(const Tensor& all, const Tensor& few, const Tensor& places);
void collect_rows(const Tensor& few, const Tensor& all, const Tensor& places);

}  // namespace tessera::cuda
