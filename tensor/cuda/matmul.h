// Matrix products on a GPU, and the one door to the library that makes them.
//
// Libraries for GPUs know matrices by columns. A matrix of ours, which lies by rows, is to them its own transpose, so
// out = a b is asked for as out^T = b^T a^T: b on the left, a on the right, rows and columns exchanged. That is done
// here once, for any library: a Product says the rest of what one is asked.
#pragma once
#include <cstddef>
#include <cstdint>
#include <filesystem>

#include "tensor/tensor.h"

namespace tessera::cuda {

// out (M, N) = a (M, K) b (K, N) + bias (N), or that for each index of a leading dim that all three have. a and b of
// any strides, copied when no product can read them as they lie; out with rows that run on, and of the dtype of a and b
// or float32; bias undefined or contiguous and of out's dtype. bfloat16 and float32 are summed in float32 and rounded
// once.
void matmul(const Tensor& out, const Tensor& a, const Tensor& b, const Tensor& bias);

// Whether products of float32 may round their factors to TF32 (10 bits of fraction): Arena::local, so one switch for
// each rank.
struct Tf32 {
  bool allowed = false;
};

// Algorithms that were timed are kept in files of this directory, for each kind of GPU and version of the library, and
// used in all later runs and by all ranks. Without it they are kept as long as the process runs.
void keep_algorithms_in(const std::filesystem::path& directory);

// The most bytes that a product may take from the arena while it runs, beside its operands.
inline constexpr int64_t kMostWorkspace = int64_t{32} << 20;

// A matrix by columns, or the first of several: element (i, j) of matrix b is at data[b * step + j * leading + i].
struct Matrices {
  std::byte* data = nullptr;
  int64_t leading = 0, step = 0;  // in elements
  bool transposed = false;        // takes part as its transpose
};

// out (m, n) = left (m, k) right (k, n), after transposition, plus bias (m) to every column: `batch` times.
struct Product {
  int64_t m = 0, n = 0, k = 0, batch = 1;
  Matrices left, right, out;
  const std::byte* bias = nullptr;  // of dtype `result`
  DType operands = DType::float32, result = DType::float32;
  bool tf32 = false;
};

// Queues the product on the stream of the arena. The library's part: driver/blaslt_matmul.cpp (tests on the emulated
// GPU have a loop). The same product of the same numbers has the same bits, in every rank of every process.
void multiply(Arena& arena, const Product& product);

}  // namespace tessera::cuda
