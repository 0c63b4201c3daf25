// Reductions in a fixed order: each output element adds its inputs in row-major order, in float (double for float64),
// so results depend neither on the number of threads nor on strides.
#pragma once
#include "tensor/tensor.h"

namespace tessera {

// Sum over the dims that broadcasting `shape` to x.shape() expands: the backward of a broadcast. Throws Error if
// `shape` does not broadcast to x.shape().
Tensor sum_to(const Tensor& x, const Shape& shape);
// Sum of all elements, shape (): in double, in row-major order, by fixed blocks of 4096.
Tensor sum(const Tensor& x);
// (..., C) -> (C): sums rows in order, in float (double for float64). out may have another floating dtype. On a GPU,
// like all sums over rows, in three levels, each in order: runs of rows (tensor/cuda/columns.cuh), 32 of these sums,
// the rest.
void sum_rows(Tensor& out, const Tensor& x);

// Target of a sum over rows: (C) with any floating dtype and strides; undefined if not requested.
struct RowSum {
  Tensor to = {};
  bool adds = false;  // accumulate: add the sum, rounded to `to`'s dtype, to `to`
};
// Second pass of sum_rows() after another kernel's first pass (tensor/ops/norm.h): parts (1, runs, C) on a GPU.
void sum_parts(Tensor& out, const Tensor& parts);

// GPU kernels: operands checked, results allocated by the caller.
namespace cuda {
void sum_rows(const Tensor& out, const Tensor& x);  // x (N, C), contiguous
void sum_parts(const Tensor& out, const Tensor& parts);
// x (K, N) -> out (K), both contiguous: sums each row in order, in double, in blocks of 4096, and then the blocks.
void sums(const char* op, const Tensor& out, const Tensor& x);
void sum_to(const Tensor& out, const Tensor& x);  // x of any strides; out contiguous, broadcasts to x's shape
}  // namespace cuda

// Softmax and log-softmax over the last dim. Any strides. Cost: one pass over memory forward and one backward.

Tensor softmax(const Tensor& x);      // (..., N) -> (..., N)
Tensor log_softmax(const Tensor& x);  // x - log(sum(exp(x)))
// dx from dy and the forward result y.
Tensor softmax_backward(const Tensor& dy, const Tensor& y);
Tensor log_softmax_backward(const Tensor& dy, const Tensor& y);

enum class SoftmaxOp { softmax, log_softmax, backward, log_backward };

constexpr const char* to_string(SoftmaxOp op) {
  constexpr const char* names[] = {"softmax", "log_softmax", "softmax_backward", "log_softmax_backward"};
  return names[static_cast<int>(op)];
}

namespace cuda {
// All four on a GPU: out from a = x, or from a = dy and b = y; contiguous, with equal shape and dtype.
void softmax(SoftmaxOp op, const Tensor& out, const Tensor& a, const Tensor& b);
}  // namespace cuda

}  // namespace tessera
