// The least dims that describe how operands of one (expanded) shape are walked: dims of size 1 are dropped, and dims
// that run on in every operand are merged. Elementwise loops, on the CPU and on a GPU, walk what is left.
#pragma once
#include <array>
#include <span>

#include "tensor/tensor.h"

namespace tessera {

inline constexpr int kMaxOperands = 3;

struct MergedDims {
  Shape shape;  // of rank 1 or more; the last dim is the inner loop
  std::array<Shape, kMaxOperands> strides;
};

MergedDims merged_dims(std::span<const Tensor* const> operands);

}  // namespace tessera
