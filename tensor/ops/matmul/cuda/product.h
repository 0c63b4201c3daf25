// The one door to the library that makes a GPU's matrix products.
//
// Libraries for GPUs know matrices by columns. A matrix of ours, which lies by rows, is to them its own transpose, so
// out = a b is asked for as out^T = b^T a^T: b on the left, a on the right, rows and columns exchanged. That is done
// here once, for any library: a Product says the rest of what one is asked.
#pragma once

#include "tensor/tensor.h"

namespace tessera::cuda {

// Whether products of float32 may round their factors to TF32 (10 bits of fraction): Arena::local, so one switch for
// each rank.
struct Tf32 {
  bool allowed = false;
};

// Algorithms that were timed are kept in files of this directory, for each kind of GPU and version of the library, and
// used in all later runs and by all ranks. Without it they are kept as long as the process runs.
void keep_algorithms_in(const std::filesystem::path& directory);

// The most bytes that a product may take from the arena while it runs, beside its operands.
inline constexpr int64_t kMaxWorkspace = int64_t{32} << 20;

// A matrix by columns, or the first of several: element (i, j) of matrix b is at data[b * step + j * leading + i].
// Columns lie packed, and data at a multiple of 16 bytes: which algorithm makes a product depends on neither.
struct Matrices {
  std::byte* data = nullptr;
  int64_t leading = 0, step = 0;  // in elements
  bool transposed = false;        // takes part as its transpose
};

// The end of a product, before it is rounded: the product itself; gelu() of it, while the product goes to `aux`; or the
// product times gelu'() of the element of `aux`, which has the shape and the dtype of out.
enum class Epilogue : uint8_t { none, gelu, gelu_gradient };

// out (m, n) = left (m, k) right (k, n), after transposition, plus bias (m) to every column: `batch` times.
struct Product {
  int64_t m = 0, n = 0, k = 0, batch = 1;
  Matrices left, right, out;
  const std::byte* bias = nullptr;  // has dtype `result`; or null
  std::byte* sums = nullptr;        // where the sums of right over k (n) go, of dtype `result`; without a bias
  Epilogue epilogue = Epilogue::none;
  Matrices aux = {};
  DType operands = DType::float32, result = DType::float32;
  bool tf32 = false;
};

// Whether the library has any algorithm for the product; what it is told of one is its shape and what is transposed.
bool has_algorithm(Arena& arena, const Product& product);
// Queues the product on the stream of the arena. The library's part: driver/blaslt_matmul.cpp (tests on the emulated
// GPU have a loop). The same product of the same numbers has the same bits, in every rank of every process.
void multiply(Arena& arena, const Product& product);

// Whether to take the first of two ways that write the same memory, each a product and what is queued after it: the
// faster one, timed once on the operands of the first call and kept like an algorithm (on the emulated GPU always the
// first). Both may be run. A first way of which the library has no product is not taken.
struct Way {
  const Product& product;
  std::function<void()> rest;
};
bool is_faster(Arena& arena, const Way& fused, const Way& apart);

}  // namespace tessera::cuda
