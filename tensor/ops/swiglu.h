// SwiGLU: the gate of a feed-forward layer, silu(gate) * up (Shazeer 2020, "GLU variants improve transformer", arXiv
// 2002.05202), of both in one tensor, as one product makes them. Cost: one pass over memory each way.
#pragma once
#include "tensor/tensor.h"

namespace tessera {

// x = [gate | up] (..., 2 F) -> silu(gate) * up (..., F), rounded once.
Tensor swiglu(const Tensor& x);
// dy (..., F) -> dx (..., 2 F): [dy up silu'(gate) | dy silu(gate)].
Tensor swiglu_backward(const Tensor& dy, const Tensor& x);

// Kernels of a GPU: operands checked and contiguous.
namespace cuda {
void swiglu(const Tensor& y, const Tensor& x);
void swiglu_backward(const Tensor& dx, const Tensor& dy, const Tensor& x);
}  // namespace cuda

}  // namespace tessera
