// Sums on a GPU. Operands as those of tensor/ops/reduce.h, checked; results made by the caller.
#pragma once
#include "tensor/tensor.h"

namespace tessera::cuda {

void sum_rows(const Tensor& out, const Tensor& x);  // x (N, C), contiguous
// x (K, N) -> out (K), both contiguous: each row in order, in double, by blocks of 4096, and those in order.
void sums(const char* op, const Tensor& out, const Tensor& x);
void sum_to(const Tensor& out, const Tensor& x);  // x of any strides; out contiguous, of a shape that broadcasts to x's

}  // namespace tessera::cuda
