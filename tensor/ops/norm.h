// LayerNorm and RMSNorm over the last dim, alone and fused with the residual sum before them.
//
// Ba, Kiros and Hinton 2016, "Layer normalization"; Zhang and Sennrich 2019, "Root mean square layer normalization".
// Any strides (a copy is made where the rows do not run on). Statistics are float32, or float64 for float64. Cost:
// about 10 FLOPs per element, one pass over memory forward and one backward.
#pragma once
#include "tensor/ops/reduce.h"

namespace tessera {

struct Normed {
  Tensor y;     // the shape and dtype of x
  Tensor mean;  // per row; undefined for RMSNorm
  Tensor rstd;  // per row: 1 / sqrt(variance + eps), or 1 / sqrt(mean square + eps)
};

struct NormOptions {
  double eps = 1e-5;
  bool center = true;  // LayerNorm; false is RMSNorm, which subtracts no mean
};

// x (..., C), gamma (C), beta (C) or undefined -> y = (x - mean) rstd gamma + beta.
Normed norm(const Tensor& x, const Tensor& gamma, const Tensor& beta, const NormOptions& options = {});

struct AddNormed {
  Tensor sum;  // x + y as stored, in the dtype of x
  Normed normed;
};
// r = x + y, then norm(r) of r as stored. Writes r over y when y's storage is held by nobody else.
AddNormed add_norm(const Tensor& x, Tensor&& y, const Tensor& gamma, const Tensor& beta,
                   const NormOptions& options = {});

// Sums over rows that norm_backward() makes beside dx; on a GPU in the same pass over memory. Rows are added in order.
struct NormSums {
  RowSum gamma = {}, beta = {};  // dgamma (C) = sum dy xhat, dbeta (C) = sum dy
  // On a GPU the first pass of sum_rows(dx), for sum_parts(): the gradient of a bias that was added before the norm.
  // Untouched on the CPU. Null: not wanted.
  Tensor* parts = nullptr;
};
// dx, with `residual` (undefined, or the gradient that x gets from elsewhere) added in the same pass. `x` is the
// input of the normalisation, which for add_norm is the sum. Writes over residual when its storage is held by nobody
// else.
Tensor norm_backward(const Tensor& dy, const Tensor& x, const Tensor& gamma, const Normed& forward, Tensor&& residual,
                     const NormSums& sums = {});

// The operands of kernels, checked and contiguous, and results that the caller has made.
struct NormOperands {
  const Tensor* x = nullptr;
  const Tensor* added = nullptr;  // null, or the y of add_norm(), and then
  const Tensor* sum = nullptr;    // where x + y goes
  const Tensor* gamma = nullptr;
  const Tensor* beta = nullptr;  // null: none
};
namespace cuda {
// `to.mean` is undefined for RMSNorm.
void norm(const NormOperands& operands, const Normed& to, double eps);
// `residual` is null, or what is added; it may be dx.
void norm_backward(const Tensor& dx, const NormOperands& operands, const Tensor& dy, const Normed& forward,
                   const Tensor* residual, const NormSums& sums);
}  // namespace cuda

}  // namespace tessera
