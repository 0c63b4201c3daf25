// Elementwise ops of elementwise_list.h on tensors, and the few that take a number.
//
// Shapes broadcast as in NumPy; any strides. Dtypes of the operands must be equal and floating. bfloat16 is computed in
// float and rounded once. Cost: one pass over each operand.
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
// dy times the partial derivative by operand 0 or 1, summed to that operand's shape.
template <class Op>
Tensor binary_backward(const Tensor& dy, const Tensor& a, const Tensor& b, int operand);

Tensor scale(const Tensor& x, double factor);
// x += factor * y, in place; y broadcasts, converts and may be of another floating dtype.
void add_(Tensor& x, const Tensor& y, double factor = 1);
void scale_(Tensor& x, double factor);

// The loop of a GPU: y = kernel(x...), of operands of y's shape and dtype (the second of AddScaled may have another
// floating one) and of any strides. The caller has made y, which may be an operand.
namespace cuda {
template <class Kernel, class... In>
void run(const Kernel& kernel, const Tensor& y, const In&... in);
}  // namespace cuda

}  // namespace tessera
