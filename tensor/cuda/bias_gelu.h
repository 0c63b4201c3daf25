// Bias and GELU on a GPU. Operands as those of tensor/ops/bias_gelu.h, checked and contiguous.
#pragma once
#include "tensor/ops/bias_gelu.h"

namespace tessera::cuda {

void bias_gelu(const BiasGelu& to, const Tensor& x, const Tensor* bias);  // to.h may be x
// dh may be dy; dbias is null or wanted.
void bias_gelu_backward(const Tensor& dh, const Tensor& dy, const Tensor& h, const Tensor* dbias);

}  // namespace tessera::cuda
