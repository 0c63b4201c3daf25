// Reductions in row-major order, in float (double for float64), independent of threads and strides.
#pragma once
#include "tensor/tensor.h"

namespace tessera {

// Backward of broadcasting `shape` to x.shape(). Throws Error if it does not broadcast.
Tensor sum_to(const Tensor& x, const Shape& shape);
// -> (): in double, in row-major order, by blocks of 4096.
Tensor sum(const Tensor& x);
// (..., C) -> (C), rows in order, in float (double for float64); any floating dtype of out. On a GPU sums over rows
// have three levels, each in order: runs of rows (tensor/cuda/columns.cuh), 32 run sums, the rest.
void sum_rows(Tensor& out, const Tensor& x);

// (C) with any floating dtype and strides; undefined if not requested.
struct RowSum {
  Tensor to = {};
  bool adds = false;  // add the rounded sum to `to`
};
// Second pass of sum_rows() after another kernel's first (tensor/ops/norm.h): partials (1, runs, C) on a GPU.
void sum_partials(Tensor& out, const Tensor& partials);

namespace cuda {
void sum_rows(const Tensor& out, const Tensor& x);  // x (N, C), contiguous
void sum_partials(const Tensor& out, const Tensor& partials);
// x (K, N) -> out (K), contiguous: rows in order, in double, by blocks of 4096.
void sums(const char* op, const Tensor& out, const Tensor& x);
void sum_to(const Tensor& out, const Tensor& x);  // x of any strides; out contiguous, broadcasts to x's shape
}  // namespace cuda

// Over the last dim. Cost: one pass over memory forward and one backward.

Tensor softmax(const Tensor& x);  // (..., N) -> (..., N)
Tensor log_softmax(const Tensor& x);
Tensor softmax_backward(const Tensor& dy, const Tensor& y);
Tensor log_softmax_backward(const Tensor& dy, const Tensor& y);

enum class SoftmaxOp { softmax, log_softmax, backward, log_backward };

constexpr const char* to_string(SoftmaxOp op) {
  constexpr const char* names[] = {"softmax", "log_softmax", "softmax_backward", "log_softmax_backward"};
  return names[static_cast<int>(op)];
}

namespace cuda {
// a = x, or a = dy and b = y; contiguous, equal shapes and dtypes.
void softmax(SoftmaxOp op, const Tensor& out, const Tensor& a, const Tensor& b);
}  // namespace cuda

}  // namespace tessera
