// Fused bias and GELU (Hendrycks and Gimpel 2016): h = x + b, y = gelu(h) of the rounded h. Cost: one pass over memory
// forward and one backward.
#pragma once
#include "tensor/ops/elementwise_list.h"
#include "tensor/ops/matmul/matmul.h"

namespace tessera {

struct BiasGelu {
  Tensor h;  // saved for backward
  Tensor y;
};
// x (..., C), bias (C) or undefined. Overwrites x with h if x's storage is not shared.
BiasGelu bias_gelu(Tensor&& x, const Tensor& bias, GeluForm form = GeluForm::tanh);
// dh = dy gelu'(h). dbias (C), if requested, receives the column sums of the rounded dh, accumulated per chunk of rows
// and then over chunks, in order; any floating dtype. Overwrites dy with dh if dy's storage is not shared.
Tensor bias_gelu_backward(Tensor&& dy, const Tensor& h, Tensor* dbias, GeluForm form = GeluForm::tanh);

namespace cuda {
void bias_gelu(const BiasGelu& to, const Tensor& x, const Tensor* bias, GeluForm form);  // to.h may be x
// dh may be dy; dbias may be null.
void bias_gelu_backward(const Tensor& dh, const Tensor& dy, const Tensor& h, const Tensor* dbias, GeluForm form);
}  // namespace cuda

// SwiGLU (Shazeer 2020, "GLU variants improve transformer", arXiv 2002.05202). Cost: one pass over memory forward and
// one backward.

// x = [gate | up] (..., 2 F) -> silu(gate) * up (..., F), rounded once.
Tensor swiglu(const Tensor& x);
// dy (..., F) -> dx (..., 2 F): [dy up silu'(gate) | dy silu(gate)].
Tensor swiglu_backward(const Tensor& dy, const Tensor& x);

namespace cuda {
void swiglu(const Tensor& y, const Tensor& x);
void swiglu_backward(const Tensor& dx, const Tensor& dy, const Tensor& x);
}  // namespace cuda

// Matmuls before and after a tanh GELU, fused if measured to be faster on this GPU (matmul_gelu() in
// tensor/ops/matmul/matmul.h). On the CPU, GELU is a separate pass with the results of bias_gelu().

// h = x w^T + b, y = gelu(h): x (..., K), w (N, K), b (N) or undefined -> (..., N). If fused, y uses the unrounded h.
BiasGelu linear_gelu(const Tensor& x, const Tensor& w, const Tensor& b, PackedWeights* packs = nullptr);
// dh = (dy w) gelu'(h): dy (..., N), w (N, K), h (..., K) -> (..., K). dbias (K), if requested, receives the row sums
// of dh, or remains undefined if those sums need a separate pass, as in linear_weight_grad_and_sums().
Tensor linear_input_grad_gelu(const Tensor& dy, const Tensor& w, const Tensor& h, Tensor* dbias,
                              PackedWeights* packs = nullptr);
// linear_weight_grad(); returns the bias gradient (N) in dw's dtype if that costs less than sum_rows(), otherwise an
// undefined tensor.
Tensor linear_weight_grad_and_sums(Tensor& dw, const Tensor& dy, const Tensor& x);

}  // namespace tessera
