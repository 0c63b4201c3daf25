// The elementwise ops on a GPU: operands of the result's shape, any strides, results made by the caller.
#pragma once
#include "tensor/ops/elementwise_list.h"
#include "tensor/tensor.h"

namespace tessera::cuda {

template <class Op>
void unary(const Tensor& y, const Tensor& x);
template <class Op>
void unary_backward(const Tensor& dx, const Tensor& dy, const Tensor& x);
template <class Op>
void binary(const Tensor& y, const Tensor& a, const Tensor& b);
// The derivative by operand 0 or 1 at (a, b), in the dtype of both.
template <class Op>
void derivative(const Tensor& d, const Tensor& a, const Tensor& b, int operand);

void multiply(const Tensor& y, const Tensor& a, const Tensor& b);  // rounded once
void scale(const Tensor& y, const Tensor& x, double factor);
void add_scaled(const Tensor& x, const Tensor& y, double factor);  // x += factor * y, of any floating dtypes

}  // namespace tessera::cuda
