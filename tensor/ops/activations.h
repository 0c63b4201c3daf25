// Activations fused with a bias, h = x + b and y = f(h) of the rounded h, or with a gate. Cost: one pass over memory
// forward and one backward. Errors name the first kind bias_gelu and the second swiglu, whatever the activation.
#pragma once
#include "tensor/ops/elementwise_list.h"
#include "tensor/ops/matmul/matmul.h"

namespace tessera {

struct Activated {
  Tensor h;  // saved for backward
  Tensor y;
};
// x (..., C), bias (C) or undefined. Overwrites x with h if x's storage is not shared.
Activated bias_activation(Tensor&& x, const Tensor& bias, Activation kind = Activation::gelu);
// dh = dy f'(h). dbias (C), if requested, receives the sum of the rounded dh over its rows in any floating dtype,
// accumulated in order per chunk of rows and then over chunks. Overwrites dy with dh if dy's storage is not shared.
Tensor bias_activation_backward(Tensor&& dy, const Tensor& h, Tensor* dbias, Activation kind = Activation::gelu);

Tensor activation(const Tensor& h, Activation kind);  // y of bias_activation(), bitwise identical

namespace cuda {
void bias_activation(const Activated& to, const Tensor& x, const Tensor* bias, Activation kind);  // to.h may be x
// dh may be dy; dbias may be null.
void bias_activation_backward(const Tensor& dh, const Tensor& dy, const Tensor& h, const Tensor* dbias,
                              Activation kind);
}  // namespace cuda

// Gated linear units: SwiGLU with silu (Shazeer 2020, "GLU variants improve transformer", arXiv 2002.05202).

// x = [gate | up] (..., 2 F) -> f(gate) * up (..., F), rounded once.
Tensor gated_activation(const Tensor& x, Activation kind = Activation::silu);
// dy (..., F) -> dx (..., 2 F): [dy up f'(gate) | dy f(gate)].
Tensor gated_activation_backward(const Tensor& dy, const Tensor& x, Activation kind = Activation::silu);

namespace cuda {
void gated_activation(const Tensor& y, const Tensor& x, Activation kind);
void gated_activation_backward(const Tensor& dx, const Tensor& dy, const Tensor& x, Activation kind);
}  // namespace cuda

// Matmuls before and after a tanh GELU, fused if measured to be faster on this GPU (matmul_gelu() in
// tensor/ops/matmul/matmul.h). On the CPU, GELU is a separate pass with the results of bias_activation().

// h = x w^T + b, y = gelu(h): x (..., K), w (N, K), b (N) or undefined -> (..., N). If fused, y uses the unrounded h.
Activated linear_gelu(const Tensor& x, const Tensor& w, const Tensor& b, PackedWeights* packs = nullptr);
// dh = (dy w) gelu'(h): dy (..., N), w (N, K), h (..., K) -> (..., K). dbias (K), if requested, receives the sum of dh
// over its rows, or remains undefined if that sum needs a separate pass, as in linear_weight_grad_and_sums().
Tensor linear_input_grad_gelu(const Tensor& dy, const Tensor& w, const Tensor& h, Tensor* dbias,
                              PackedWeights* packs = nullptr);
// As linear_weight_grad(), but returns the bias gradient (N) in dw's dtype if that costs less than sum_rows(),
// otherwise an undefined tensor.
Tensor linear_weight_grad_and_sums(Tensor& dw, const Tensor& dy, const Tensor& x);

}  // namespace tessera
