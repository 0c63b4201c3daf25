// The norms on a GPU. Operands as those of tensor/ops/norm.h, checked and contiguous; results made by the caller.
#pragma once
#include "tensor/ops/norm.h"

namespace tessera::cuda {

struct NormOperands {
  const Tensor* x = nullptr;
  const Tensor* added = nullptr;  // null, or the y of add_norm(), and then
  const Tensor* sum = nullptr;    // where x + y goes
  const Tensor* gamma = nullptr;
  const Tensor* beta = nullptr;  // null: none
};

// `to.mean` is undefined for RMSNorm.
void norm(const NormOperands& operands, const Normed& to, double eps);
// `residual` is null, or what is added; it may be dx.
void norm_backward(const Tensor& dx, const NormOperands& operands, const Tensor& dy, const Normed& forward,
                   const Tensor* residual);
// dbeta is null or wanted. Both of any floating dtype.
void norm_weight_grads(const Tensor& dgamma, const Tensor* dbeta, const Tensor& dy, const Tensor& x,
                       const Normed& forward);

}  // namespace tessera::cuda
