// Interface to a GPU's GEMM library.
//
// Such libraries are column-major and read a row-major matrix as its transpose. Therefore out = a b is computed as
// out^T = b^T a^T.
#pragma once
#include <cstdint>
#include <filesystem>
#include <functional>

#include "tensor/tensor.h"

namespace tessera::cuda {

// Whether float32 GEMMs may round operands to TF32 (10 mantissa bits); per rank, in Arena::local.
struct Tf32 {
  bool allowed = false;
};

// Caches timed algorithms in this directory, one file per kind of GPU and library version, as well as in the process.
void cache_algorithms_in(const std::filesystem::path& directory);

inline constexpr int64_t kMaxWorkspace = int64_t{32} << 20;

// Batch of column-major matrices: element (i, j) of matrix b is data[b * step + j * leading + i]. Packed and aligned to
// 16 bytes, so that algorithm selection depends on neither.
struct Matrices {
  std::byte* data = nullptr;
  int64_t leading = 0, step = 0;  // in elements
  bool transposed = false;
};

// Applied before rounding: nothing; gelu(), storing its input in `aux`; or multiplication by gelu'(aux). aux has out's
// shape and dtype.
enum class Epilogue : uint8_t { none, gelu, gelu_gradient };

// out (m, n) = left (m, k) right (k, n), after transposition, plus bias (m) per column; `batch` times.
struct GemmProblem {
  int64_t m = 0, n = 0, k = 0, batch = 1;
  Matrices left, right, out;
  const std::byte* bias = nullptr;  // dtype `result`; or null
  std::byte* sums = nullptr;        // sums of right over k: (n), dtype `result`; requires a null bias
  Epilogue epilogue = Epilogue::none;
  Matrices aux = {};
  DType operands = DType::float32, result = DType::float32;
  bool tf32 = false;
};

bool has_algorithm(Arena& arena, const GemmProblem& problem);
// Queues the GEMM. Implemented in driver/blaslt.cpp, and by a loop on the emulated GPU. Equal inputs give bitwise
// identical results in every rank of every process.
void multiply(Arena& arena, const GemmProblem& problem);

// Selects the faster of two implementations, each a GEMM followed by other work: timed on the first call's operands
// (both may run) and cached like an algorithm. `fused` is not selected if it has no algorithm; the emulated GPU always
// selects it.
struct GemmPath {
  const GemmProblem& problem;
  std::function<void()> rest;
};
bool is_faster(Arena& arena, const GemmPath& fused, const GemmPath& separate);

}  // namespace tessera::cuda
