// Reductions in row-major order, in float (double for float64), independent of threads and strides.
#pragma once
#include "tensor/tensor.h"

namespace tessera {

// Backward of broadcasting `shape` to x.shape(). Throws Error if `shape` does not broadcast to it.
Tensor sum_to(const Tensor& x, const Shape& shape);
// -> (): in double, in row-major order, by blocks of 4096.
Tensor sum(const Tensor& x);
// (..., C) -> (C), rows in order, in float (double for float64); out may have any floating dtype. In leaves
// (tensor/cpu/token_tree.h) the rows of x (B, T, C) are tokens of sequences. On a GPU sums over
// rows have three levels, each in order: runs of rows (tensor/cuda/columns.cuh), groups of 32 runs, all groups.
void sum_rows(Tensor& out, const Tensor& x);

// (C) with any floating dtype and strides; undefined if not requested.
struct RowSum {
  Tensor to = {};
  bool adds = false;  // add the rounded sum to `to`
};
// Second pass of sum_rows() after another kernel has done the first (tensor/ops/norm.h): partials (1, runs, C) on a
// GPU.
void sum_partials(Tensor& out, const Tensor& partials);

namespace cuda {
void sum_rows(const Tensor& out, const Tensor& x);  // x (N, C), contiguous
void sum_partials(const Tensor& out, const Tensor& partials);
// x (K, N) -> out (K), contiguous: rows in order, in double, by blocks of 4096.
void sums(const char* op, const Tensor& out, const Tensor& x);
void sum_to(const Tensor& out, const Tensor& x);  // x of any strides; out contiguous, broadcasts to x's shape
}  // namespace cuda

}  // namespace tessera
