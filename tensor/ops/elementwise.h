// The elementwise ops of elementwise_list.h on tensors, and ops with a scalar.
//
// Shapes broadcast as in NumPy. Operands must have the same floating dtype. bfloat16 is computed in float and rounded
// once. Cost: one pass over each operand.
#pragma once
#include "tensor/ops/elementwise_list.h"
#include "tensor/tensor.h"

namespace tessera {

template <class Op>
Tensor unary(const Tensor& x);  // y = f(x)
template <class Op>
Tensor unary_backward(const Tensor& dy, const Tensor& x);  // dx = dy f'(x)
template <class Op>
Tensor binary(const Tensor& a, const Tensor& b);  // y = f(a, b)
// dy times the partial derivative with respect to operand 0 or 1, reduced to that operand's shape.
template <class Op>
Tensor binary_backward(const Tensor& dy, const Tensor& a, const Tensor& b, int operand);

Tensor scale(const Tensor& x, double factor);
// x += factor * y, in place; y is broadcast and may have a different floating dtype.
void add_(Tensor& x, const Tensor& y, double factor = 1);
void scale_(Tensor& x, double factor);

// y = kernel(x...): operands have y's shape, y's dtype (except AddScaled's second operand) and any strides. The caller
// allocates y, which may be an operand.
namespace cuda {
template <class Kernel, class... In>
void run(const Kernel& kernel, const Tensor& y, const In&... in);
}  // namespace cuda

}  // namespace tessera
