// Bias and GELU in one pass: h = x + b, y = gelu(h) of h as stored (Hendrycks and Gimpel 2016; GPT-2 uses the tanh
// form). Cost: one pass over memory each way.
#pragma once
#include "tensor/ops/elementwise_list.h"
#include "tensor/ops/matmul/matmul.h"

namespace tessera {

struct BiasGelu {
  Tensor h;  // the sum x + bias, which backward needs
  Tensor y;
};
// x (..., C), bias (C) or undefined. Writes h over x when x's storage is held by nobody else.
BiasGelu bias_gelu(Tensor&& x, const Tensor& bias, GeluForm form = GeluForm::tanh);
// dh = dy gelu'(h), and in the same pass, when dbias is given, dbias (C) = the rows of dh as stored, added in
// order, 64 at a time, and then those sums in order; dbias may be of another floating dtype. Writes dh over dy when
// dy's storage is held by nobody else.
Tensor bias_gelu_backward(Tensor&& dy, const Tensor& h, Tensor* dbias, GeluForm form = GeluForm::tanh);

// Kernels of a GPU: operands checked and contiguous.
namespace cuda {
void bias_gelu(const BiasGelu& to, const Tensor& x, const Tensor* bias, GeluForm form);  // to.h may be x
// dh may be dy; dbias is null or wanted.
void bias_gelu_backward(const Tensor& dh, const Tensor& dy, const Tensor& h, const Tensor* dbias, GeluForm form);
}  // namespace cuda

// SwiGLU: the gate of a feed-forward layer, silu(gate) * up (Shazeer 2020, "GLU variants improve transformer", arXiv
// 2002.05202), of both in one tensor, as one product makes them. Cost: one pass over memory each way.

// x = [gate | up] (..., 2 F) -> silu(gate) * up (..., F), rounded once.
Tensor swiglu(const Tensor& x);
// dy (..., F) -> dx (..., 2 F): [dy up silu'(gate) | dy silu(gate)].
Tensor swiglu_backward(const Tensor& dy, const Tensor& x);

// Kernels of a GPU: operands checked and contiguous.
namespace cuda {
void swiglu(const Tensor& y, const Tensor& x);
void swiglu_backward(const Tensor& dx, const Tensor& dy, const Tensor& x);
}  // namespace cuda

// The products on both sides of a GELU of the tanh form, with its pass where that is faster: on a GPU in the product's
// own epilogue, where that was measured to be faster on the machine (matmul_gelu() in tensor/ops/matmul/matmul.h); on
// the CPU always a pass of its own (bias_gelu()), with its bits.

// h = x w^T + b, y = gelu(h): x (..., K), w (N, K), b (N) or undefined -> (..., N). Where the pass is the product's
// own, y is gelu() of the sum before it is rounded to h.
BiasGelu linear_gelu(const Tensor& x, const Tensor& w, const Tensor& b, PackedWeights* packs = nullptr);
// dh = (dy w) gelu'(h): dy (..., N), w (N, K), h (..., K) -> (..., K); and dbias (K), when given, the sums of dh's
// rows, unless these would take a pass of their own: then dbias is undefined afterwards, and whoever makes the weight's
// gradient from dh gets them from linear_weight_grad_and_sums().
Tensor linear_input_grad_gelu(const Tensor& dy, const Tensor& w, const Tensor& h, Tensor* dbias,
                              PackedWeights* packs = nullptr);
// linear_weight_grad(), which also makes the gradient of the bias (N), of dw's dtype, where that costs less than
// sum_rows(): undefined where it does not.
Tensor linear_weight_grad_and_sums(Tensor& dw, const Tensor& dy, const Tensor& x);

}  // namespace tessera
