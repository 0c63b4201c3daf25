// LayerNorm (Ba, Kiros and Hinton 2016) and RMSNorm (Zhang and Sennrich 2019) over the last dim, optionally fused with
// the preceding residual addition. Non-contiguous rows are copied. Statistics are float32, or float64 for float64.
// Cost: about 10 FLOPs per element, one pass over memory forward and one backward.
#pragma once
#include "tensor/ops/reduce.h"

namespace tessera {

struct Normed {
  Tensor y;
  Tensor mean;  // per row; undefined for RMSNorm
  Tensor rstd;  // per row: 1 / sqrt(variance (RMSNorm: mean square) + eps)
};

struct NormOptions {
  double eps = 1e-5;
  bool center = true;  // true: LayerNorm; false: RMSNorm
};

// x (..., C), gamma (C), beta (C) or undefined -> y = (x - mean) rstd gamma + beta.
Normed norm(const Tensor& x, const Tensor& gamma, const Tensor& beta, const NormOptions& options = {});

struct AddNormed {
  Tensor sum;
  Normed normed;
};
// r = x + y, then norm(r) of the rounded r. Overwrites y with r if y's storage is not shared.
AddNormed add_norm(const Tensor& x, Tensor&& y, const Tensor& gamma, const Tensor& beta,
                   const NormOptions& options = {});

// Sums over rows in order, which norm_backward() computes in the same pass on a GPU.
struct NormSums {
  RowSum gamma = {}, beta = {};  // dgamma (C) = sum dy xhat, dbeta (C) = sum dy
  // On a GPU, receives the partial sums of sum_rows(dx) for sum_partials(): the gradient of a bias added before the
  // norm.
  Tensor* partials = nullptr;
};
// dx plus `residual` (undefined, or the gradient of x from its other uses), which is overwritten if its storage is not
// shared. `x` is the input of the normalization: for add_norm() the sum.
Tensor norm_backward(const Tensor& dy, const Tensor& x, const Tensor& gamma, const Normed& forward, Tensor&& residual,
                     const NormSums& sums = {});

struct NormOperands {
  const Tensor* x = nullptr;
  const Tensor* added = nullptr;  // y of add_norm(), or null
  const Tensor* sum = nullptr;    // receives x + y; null without `added`
  const Tensor* gamma = nullptr;
  const Tensor* beta = nullptr;
};
namespace cuda {
void norm(const NormOperands& operands, const Normed& to, double eps);
// `residual` may be null, or dx itself.
void norm_backward(const Tensor& dx, const NormOperands& operands, const Tensor& dy, const Normed& forward,
                   const Tensor* residual, const NormSums& sums);
}  // namespace cuda

}  // namespace tessera
