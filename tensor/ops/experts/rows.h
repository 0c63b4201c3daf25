// Products of linear layers y = x w^T side by side, as the experts of a layer make them, each for as many rows as
// happen to come: rows of group 0, then those of group 1, and so on, and each group's own w.
//
// Each element is one chain of fused multiply-adds in the order of the inner dim (tensor/cpu/tile_gemm.h), so the bits
// of a row depend neither on how many rows and groups there are, nor on its place among them, nor on threads; and no
// kernel is compiled for a number of rows. bfloat16 is multiplied in float32 and rounded once. On a GPU all groups are
// one launch, and float32 and float64 have the bits of the CPU; bfloat16 goes through tensor cores, which add sixteen
// products at a time, in the order of the inner dim. No rows are right too: then the weight's gradient is zero.
// Cost: 2 R N K FLOPs.
#pragma once
#include <cstdint>
#include <vector>

#include "tensor/tensor.h"

namespace tessera {

struct RowsGroup {
  Tensor w;           // (N, K), of the dtype of the rows; or the gradient of such a weight
  int64_t rows = 0;   // that meet it
  bool adds = false;  // the gradient is added to what stands there, as add_() would
};

// x (R, K) -> (R, N).
Tensor linear_rows(const Tensor& x, const std::vector<RowsGroup>& groups);
// dy (R, N) -> (R, K).
Tensor linear_rows_input_grad(const Tensor& dy, const std::vector<RowsGroup>& groups);
// dy^T x of each group's rows, in order, to its gradient: of any floating dtype, or undefined where nobody wants it.
void linear_rows_weight_grads(const std::vector<RowsGroup>& groups, const Tensor& dy, const Tensor& x);

enum class RowsProduct : uint8_t { forward, input_grad, weight_grad };

// Kernels of a GPU.
namespace cuda {
// other = left w^T, other = left w, or w = left^T other, for one of the three above, of contiguous matrices. Gradients
// are all of the dtype of the rows, or of its wide one. One launch for every 192 groups.
void multiply_rows(RowsProduct which, const Tensor& left, const Tensor& other, const std::vector<RowsGroup>& groups);
}  // namespace cuda

}  // namespace tessera
