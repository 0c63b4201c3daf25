// The products on both sides of a GELU, with its pass where that is faster: on a GPU in the product's own epilogue,
// where that was measured to be faster on the machine (matmul_gelu() in tensor/ops/matmul/matmul.h); on the CPU always
// a pass of its own (bias_gelu.h), with its bits.
#pragma once
#include "tensor/ops/bias_gelu.h"
#include "tensor/ops/matmul/matmul.h"

namespace tessera {

// h = x w^T + b, y = gelu(h): x (..., K), w (N, K), b (N) or undefined -> (..., N). Where the pass is the product's
// own, y is gelu() of the sum before it is rounded to h.
BiasGelu linear_gelu(const Tensor& x, const Tensor& w, const Tensor& b, WeightPacks* packs = nullptr);
// dh = (dy w) gelu'(h): dy (..., N), w (N, K), h (..., K) -> (..., K); and dbias (K), when given, the sums of dh's
// rows, unless these would take a pass of their own: then dbias is undefined afterwards, and whoever makes the weight's
// gradient from dh gets them from linear_weight_grad_and_sums().
Tensor linear_input_grad_gelu(const Tensor& dy, const Tensor& w, const Tensor& h, Tensor* dbias,
                              WeightPacks* packs = nullptr);
// linear_weight_grad(), which also makes the gradient of the bias (N), of dw's dtype, where that costs less than
// sum_rows(): undefined where it does not.
Tensor linear_weight_grad_and_sums(Tensor& dw, const Tensor& dy, const Tensor& x);

}  // namespace tessera
