// Sums, in a fixed order: each output element adds its inputs in row-major order, in float (double for float64), so
// that neither the number of threads nor the strides change a bit.
#pragma once
#include "tensor/tensor.h"

namespace tessera {

// The sum over the dims in which `shape` is smaller: the backward of a broadcast. Throws when x.shape() does not come
// from `shape` by broadcasting.
Tensor sum_to(const Tensor& x, const Shape& shape);
// All elements, shape (). Sums in double, in row-major order of the elements, by fixed blocks of 4096.
Tensor sum(const Tensor& x);
// (..., C) -> (C): sums rows in order, in float (double for float64). out may have another floating dtype. On a GPU, as
// all its sums over rows: runs of rows in order (tensor/cuda/columns.cuh), 32 of these sums in order, and then those.
void sum_rows(Tensor& out, const Tensor& x);

// The target of a sum over rows: (C) of any floating dtype and strides; undefined where nobody wants it.
struct RowSum {
  Tensor to = {};
  bool adds = false;  // the sum, rounded to `to`'s dtype, is added to what stands there
};
// Ends a sum_rows() whose first pass another kernel has made (tensor/ops/norm.h): parts (1, runs, C) on a GPU.
void sum_parts(Tensor& out, const Tensor& parts);

// Kernels of a GPU: operands checked, results made by the caller.
namespace cuda {
void sum_rows(const Tensor& out, const Tensor& x);  // x (N, C), contiguous
void sum_parts(const Tensor& out, const Tensor& parts);
// x (K, N) -> out (K), both contiguous: each row in order, in double, by blocks of 4096, and those in order.
void sums(const char* op, const Tensor& out, const Tensor& x);
void sum_to(const Tensor& out, const Tensor& x);  // x of any strides; out contiguous, of a shape that broadcasts to x's
}  // namespace cuda

// Softmax over the last dim and its logarithm. Any strides. Cost: one pass over memory each way.

Tensor softmax(const Tensor& x);      // (..., N) -> (..., N)
Tensor log_softmax(const Tensor& x);  // x - log(sum(exp(x)))
// dx from dy and the forward's own result y.
Tensor softmax_backward(const Tensor& dy, const Tensor& y);
Tensor log_softmax_backward(const Tensor& dy, const Tensor& y);

enum class SoftmaxOp { softmax, log_softmax, backward, log_backward };

constexpr const char* to_string(SoftmaxOp op) {
  constexpr const char* names[] = {"softmax", "log_softmax", "softmax_backward", "log_softmax_backward"};
  return names[static_cast<int>(op)];
}

namespace cuda {
// All four on a GPU: out from a = x, or from a = dy and b = y, contiguous, of one shape and dtype.
void softmax(SoftmaxOp op, const Tensor& out, const Tensor& a, const Tensor& b);
}  // namespace cuda

}  // namespace tessera
