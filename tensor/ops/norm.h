// LayerNorm (Ba, Kiros and Hinton 2016) and RMSNorm (Zhang and Sennrich 2019) over the last dim, optionally fused with
// the preceding residual addition. Non-contiguous rows are copied. Statistics are float32, or float64 for float64.
// Cost: about 10 FLOPs per element, one pass over memory forward and one backward.
#pragma once
#include "tensor/ops/reduce.h"

namespace tessera {

struct Normed {
  Tensor y;
  Tensor mean;  // per row; undefined for RMSNorm
  Tensor rstd;  // per row: 1 / sqrt(variance (RMSNorm: mean square) + eps)
};

struct NormOptions {
  double eps = 1e-5;
  bool center = true;  // true: LayerNorm; false: RMSNorm
};

// x (..., C), gamma (C), beta (C) or undefined -> y = (x - mean) rstd gamma + beta.
Normed norm(const Tensor& x, const Tensor& gamma, const Tensor& beta, const NormOptions& options = {});

struct AddNormed {
  Tensor sum;
  Normed normed;
};
// r = x + y, then norm(r) of the rounded r. Overwrites y with r if y's storage is not shared.
AddNormed add_norm(const Tensor& x, Tensor&& y, const Tensor& gamma, const Tensor& beta,
                   const NormOptions& options = {});

// Sums over rows in order, which norm_backward() computes in the same pass on a GPU.
struct NormSums {
  RowSum gamma = {}, beta = {};  // dgamma (C) = sum dy xhat, dbeta (C) = sum dy
  // On a GPU, receives the partial sums of sum_rows(dx) for sum_partials(): the gradient of a bias added before the
  // norm.
  Tensor* partials = nullptr;
};
// dx plus `residual` (undefined, or the gradient of x from its other uses), which is overwritten if its storage is not
// shared. `x` is the input of the normalization: for add_norm() the sum.
Tensor norm_backward(const Tensor& dy, const Tensor& x, const Tensor& gamma, const Normed& forward, Tensor&& residual,
                     const NormSums& sums = {});

struct NormOperands {
  const Tensor& x;
  Tensor added = {}, sum = {};  // y of add_norm(), and x + y; or undefined
  Tensor gamma = {}, beta = {};
  Normed out = {};
  double eps = 0;
};
struct NormBackwardOperands {
  const Tensor &dx, &dy, &x, &gamma;
  const Normed& forward;
  const Tensor& residual;  // undefined, or may be dx
};

// The operands as pointers, for the kernels of both devices, which process rows of C elements.
template <class T>
struct NormForward {
  using A = Accumulate<T>;
  const T *x, *added, *gamma, *beta;  // added and beta may be null
  T *sum, *y;                         // sum may be null
  A *mean, *rstd;                     // mean is null for RMSNorm
  A eps;
};
template <class T>
NormForward<T> make_norm_forward(const NormOperands& o) {
  using A = Accumulate<T>;
  const Device d = o.x.device();
  return {o.x.data_on<T>(d),        o.added.data_on<T>(d),    o.gamma.data_on<T>(d),
          o.beta.data_on<T>(d),     o.sum.data_on<T>(d),      o.out.y.data_on<T>(d),
          o.out.mean.data_on<A>(d), o.out.rstd.data_on<A>(d), static_cast<A>(o.eps)};
}
template <class T>
struct NormBackward {
  using A = Accumulate<T>;
  const T *dy, *x, *gamma, *residual;  // residual may be null, or dx itself
  const A *mean, *rstd;                // mean is null for RMSNorm
  T* dx;
};
template <class T>
NormBackward<T> make_norm_backward(const NormBackwardOperands& o) {
  using A = Accumulate<T>;
  const Device d = o.x.device();
  return {o.dy.data_on<T>(d),
          o.x.data_on<T>(d),
          o.gamma.data_on<T>(d),
          o.residual.data_on<T>(d),
          o.forward.mean.data_on<A>(d),
          o.forward.rstd.data_on<A>(d),
          o.dx.data_on<T>(d)};
}

namespace cuda {
void norm(const NormOperands& operands);
void norm_backward(const NormBackwardOperands& operands, const NormSums& sums);
}  // namespace cuda

}  // namespace tessera
