// Softmax over the last dim and its logarithm. Any strides. Cost: one pass over memory each way.
#pragma once
#include "tensor/tensor.h"

namespace tessera {

Tensor softmax(const Tensor& x);      // (..., N) -> (..., N)
Tensor log_softmax(const Tensor& x);  // x - log(sum(exp(x)))
// dx from dy and the forward's own result y.
Tensor softmax_backward(const Tensor& dy, const Tensor& y);
Tensor log_softmax_backward(const Tensor& dy, const Tensor& y);

enum class SoftmaxOp { softmax, log_softmax, backward, log_backward };

constexpr const char* name_of(SoftmaxOp op) {
  constexpr const char* names[] = {"softmax", "log_softmax", "softmax_backward", "log_softmax_backward"};
  return names[static_cast<int>(op)];
}

namespace cuda {
// All four on a GPU: out from a = x, or from a = dy and b = y, contiguous, of one shape and dtype.
void softmax(SoftmaxOp op, const Tensor& out, const Tensor& a, const Tensor& b);
}  // namespace cuda

}  // namespace tessera
