// Interface to the GEMM library of a GPU.
//
// GPU GEMM libraries are column-major, so they read a row-major matrix as its transpose. Therefore out = a b is
// computed as out^T = b^T a^T: b on the left, a on the right, rows and columns exchanged. This conversion happens here,
// for any library; a GemmProblem describes the rest of the problem.
#pragma once

#include "tensor/tensor.h"

namespace tessera::cuda {

// Whether float32 GEMMs may round their operands to TF32 (10 mantissa bits): Arena::local, so one setting per rank.
struct Tf32 {
  bool allowed = false;
};

// Caches timed algorithms in files of this directory, one for each kind of GPU and library version, for all later runs
// and all ranks. Without a directory they are cached for the lifetime of the process.
void keep_algorithms_in(const std::filesystem::path& directory);

// Maximum workspace that a GEMM takes from the arena while it runs.
inline constexpr int64_t kMaxWorkspace = int64_t{32} << 20;

// Batch of column-major matrices: element (i, j) of matrix b is at data[b * step + j * leading + i]. Columns are packed
// and data is aligned to 16 bytes, so the choice of algorithm depends on neither.
struct Matrices {
  std::byte* data = nullptr;
  int64_t leading = 0, step = 0;  // in elements
  bool transposed = false;        // used transposed
};

// Epilogue of a GEMM, before rounding: none; gelu(), with the input of gelu() stored in `aux`; or multiplication by
// gelu'() of the elements of `aux`, which has out's shape and dtype.
enum class Epilogue : uint8_t { none, gelu, gelu_gradient };

// out (m, n) = left (m, k) right (k, n), after transposition, plus bias (m) to every column: `batch` times.
struct GemmProblem {
  int64_t m = 0, n = 0, k = 0, batch = 1;
  Matrices left, right, out;
  const std::byte* bias = nullptr;  // with dtype `result`; or null
  std::byte* sums = nullptr;        // receives the sums of right over k: (n), with dtype `result`; requires no bias
  Epilogue epilogue = Epilogue::none;
  Matrices aux = {};
  DType operands = DType::float32, result = DType::float32;
  bool tf32 = false;
};

// Whether the library has an algorithm for the problem; depends only on shapes, dtypes and transposition.
bool has_algorithm(Arena& arena, const GemmProblem& problem);
// Queues the problem on the stream of the arena. Implemented in driver/blaslt.cpp (the emulated GPU of the tests has a
// loop). Equal inputs give bitwise identical results in every rank of every process.
void multiply(Arena& arena, const GemmProblem& problem);

// Selects the faster of two implementations that write the same results, each a GEMM followed by other work: timed once
// on the operands of the first call (both may run) and cached like an algorithm. The emulated GPU always selects
// `fused`. Not selected if the library has no algorithm for its GEMM.
struct GemmPath {
  const GemmProblem& problem;
  std::function<void()> rest;
};
bool is_faster(Arena& arena, const GemmPath& fused, const GemmPath& separate);

}  // namespace tessera::cuda
