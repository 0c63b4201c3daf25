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

// Kernels of a GPU: operands checked, results made by the caller.
namespace cuda {
void sum_rows(const Tensor& out, const Tensor& x);  // x (N, C), contiguous
// x (K, N) -> out (K), both contiguous: each row in order, in double, by blocks of 4096, and those in order.
void sums(const char* op, const Tensor& out, const Tensor& x);
void sum_to(const Tensor& out, const Tensor& x);  // x of any strides; out contiguous, of a shape that broadcasts to x's
}  // namespace cuda

}  // namespace tessera
