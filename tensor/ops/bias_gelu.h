// Bias and GELU in one pass: h = x + b, y = gelu(h) of h as stored (the tanh form of Hendrycks and Gimpel 2016, which
// is what GPT-2 uses). Cost: one pass over memory each way.
#pragma once
#include "tensor/tensor.h"

namespace tessera {

struct BiasGelu {
  Tensor h;  // what backward needs
  Tensor y;
};
// x (..., C), bias (C) or undefined. Writes h over x when x's storage is held by nobody else.
BiasGelu bias_gelu(Tensor&& x, const Tensor& bias);
// dh = dy gelu'(h), and in the same pass, when dbias is given, dbias (C) = the rows of dh as stored, added in
// order, 64 at a time, and then those sums in order; dbias may be of another floating dtype. Writes dh over dy when
// dy's storage is held by nobody else.
Tensor bias_gelu_backward(Tensor&& dy, const Tensor& h, Tensor* dbias);

// Kernels of a GPU: operands checked and contiguous.
namespace cuda {
void bias_gelu(const BiasGelu& to, const Tensor& x, const Tensor* bias);  // to.h may be x
// dh may be dy; dbias is null or wanted.
void bias_gelu_backward(const Tensor& dh, const Tensor& dy, const Tensor& h, const Tensor* dbias);
}  // namespace cuda

}  // namespace tessera
