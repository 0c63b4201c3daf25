// The products of a linear layer y = x w^T for as many rows as happen to come, as an expert's do.
//
// Each element is one chain of fused multiply-adds in the order of the inner dim (tensor/cpu/tile_gemm.h), so the bits
// of a row depend neither on how many rows there are, nor on its place among them, nor on threads; and no kernel is
// compiled for a number of rows. bfloat16 is multiplied in float32 and rounded once. On a GPU float32 and float64 have
// the bits of the CPU; bfloat16 goes through tensor cores, which add sixteen products at a time, in the order of the
// inner dim. No rows are right too: then the weight's gradient is zero. Cost: 2 M N K FLOPs.
#pragma once
#include <cstdint>

#include "tensor/tensor.h"

namespace tessera {

Tensor linear_rows(const Tensor& x, const Tensor& w);              // x (M, K), w (N, K) -> (M, N)
Tensor linear_rows_input_grad(const Tensor& dy, const Tensor& w);  // dy (M, N), w (N, K) -> (M, K)
// dw (N, K) = dy^T x, the rows in order; overwrites dw, which may be float32 where dy is bfloat16.
void linear_rows_weight_grad(Tensor& dw, const Tensor& dy, const Tensor& x);

enum class RowsProduct : uint8_t { forward, input_grad, weight_grad };

// Kernels of a GPU.
namespace cuda {
// out = left right^T, left right, or left^T right of contiguous matrices, for one of the three above. `out` is
// contiguous; of bfloat16 it is bfloat16, or a weight's gradient in float32.
void multiply_rows(RowsProduct which, const Tensor& out, const Tensor& left, const Tensor& right);
}  // namespace cuda

}  // namespace tessera
