// Sums, in a fixed order: each output element adds its inputs in row-major order, in float (double for float64), so
// that neither the number of threads nor the strides change a bit.
#pragma once
#include "tensor/tensor.h"

namespace tessera {

// The sum over the dims in which `shape` is smaller: the backward of a broadcast. Throws when x.shape() does not come
// from `shape` by broadcasting.
Tensor sum_to(const Tensor& x, const Shape& shape);
// All elements, shape (). Sums in double, in row-major order of the elements, by fixed blocks of 4096.
Tensor sum(const Tensor& x);
// (..., C) -> (C): sums rows in order, in float (double for float64). out may have another floating dtype. On a GPU, as
// all its sums over rows: 64 rows in order, 32 of these sums in order, and then those in order.
void sum_rows(Tensor& out, const Tensor& x);

}  // namespace tessera
