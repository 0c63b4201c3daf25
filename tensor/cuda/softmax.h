// The four functions of tensor/ops/softmax.h on a GPU.
#pragma once
#include "tensor/tensor.h"

namespace tessera::cuda {

enum class SoftmaxOp { softmax, log_softmax, backward, log_backward };

constexpr const char* name_of(SoftmaxOp op) {
  constexpr const char* names[] = {"softmax", "log_softmax", "softmax_backward", "log_softmax_backward"};
  return names[static_cast<int>(op)];
}

// out from a = x, or from a = dy and b = y: contiguous, of one shape and dtype.
void softmax(SoftmaxOp op, const Tensor& out, const Tensor& a, const Tensor& b);

}  // namespace tessera::cuda
