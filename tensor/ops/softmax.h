// Softmax over the last dim, shifted by the row's maximum so that no exponential overflows. Cost: one pass over memory
// forward and one backward.
#pragma once
#include "tensor/tensor.h"

namespace tessera {

Tensor softmax(const Tensor& x);  // (..., N) -> (..., N)
Tensor log_softmax(const Tensor& x);
Tensor softmax_backward(const Tensor& dy, const Tensor& y);
Tensor log_softmax_backward(const Tensor& dy, const Tensor& y);

enum class SoftmaxOp { softmax, log_softmax, backward, log_backward };

constexpr const char* to_string(SoftmaxOp op) {
  constexpr const char* names[] = {"softmax", "log_softmax", "softmax_backward", "log_softmax_backward"};
  return names[static_cast<int>(op)];
}

namespace cuda {
// a = x, or a = dy and b = y; contiguous, equal shapes and dtypes.
void softmax(SoftmaxOp op, const Tensor& out, const Tensor& a, const Tensor& b);
}  // namespace cuda

}  // namespace tessera
