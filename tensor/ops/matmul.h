// Matrix products.
//
// float32 and bfloat16 go to oneDNN (sums in float32, one rounding), float64 to our own blocked kernel; on a GPU all of
// them go to cuBLASLt (tensor/cuda/matmul.h).
#pragma once
#include <vector>

#include "tensor/cpu/dnnl_matmul.h"
#include "tensor/tensor.h"

namespace tessera {

// (..., M, K) x (..., K, N) -> (..., M, N) with equal leading dims, or (..., M, K) x (K, N). Any strides. Throws when
// the inner dims or the dtypes differ. Cost: 2 M N K FLOPs per matrix.
Tensor matmul(const Tensor& a, const Tensor& b);
// out (M, N) = a (M, K) b (K, N): for 2-D views; out has contiguous rows and may be float32 where a and b are bfloat16.
void matmul_into(Tensor& out, const Tensor& a, const Tensor& b);

// A weight's copies in packed layout, made when they are first needed after each optimizer step (Storage::version).
struct WeightPacks {
  std::vector<cpu::Packed> packs;
};

// The linear layer y = x w^T + b. x (..., K), w (N, K), b (N) or undefined -> (..., N).
Tensor linear(const Tensor& x, const Tensor& w, const Tensor& b, WeightPacks* packs = nullptr);
// The same for x (M, K) into y (M, N), whose rows run on.
void linear_into(Tensor& y, const Tensor& x, const Tensor& w, const Tensor& b, WeightPacks* packs = nullptr);
// dx = dy w: (..., N) -> (..., K).
Tensor linear_input_grad(const Tensor& dy, const Tensor& w, WeightPacks* packs = nullptr);
// The same for dy (M, N) into dx (M, K), whose rows run on.
void linear_input_grad_into(Tensor& dx, const Tensor& dy, const Tensor& w, WeightPacks* packs = nullptr);
// dw (N, K) = dy^T x, over all rows; overwrites dw, which may be float32 where dy is bfloat16.
void linear_weight_grad(Tensor& dw, const Tensor& dy, const Tensor& x);

}  // namespace tessera
