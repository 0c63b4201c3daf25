// Softmax over the last dim and its logarithm. Any strides. Cost: one pass over memory each way.
#pragma once
#include "tensor/tensor.h"

namespace tessera {

Tensor softmax(const Tensor& x);      // (..., N) -> (..., N)
Tensor log_softmax(const Tensor& x);  // x - log(sum(exp(x)))
// dx from dy and the forward's own result y.
Tensor softmax_backward(const Tensor& dy, const Tensor& y);
Tensor log_softmax_backward(const Tensor& dy, const Tensor& y);

}  // namespace tessera
