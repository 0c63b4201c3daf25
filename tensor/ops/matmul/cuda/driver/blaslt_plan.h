// One product as cuBLASLt is told of it: the operation, the layouts of its matrices, and the algorithm.
#pragma once
#include <cublasLt.h>

#include <array>
#include <string>
#include <vector>

#include "tensor/cuda/runtime.h"
#include "tensor/ops/matmul/cuda/product.h"

namespace tessera::cuda {

// Throws Error naming the library's cause.
void expect_blas(cublasStatus_t status, const char* what);

using BlasLibrary = Handle<cublasLtHandle_t, cublasLtDestroy>;
using BlasOperation = Handle<cublasLtMatmulDesc_t, cublasLtMatmulDescDestroy>;
using BlasLayout = Handle<cublasLtMatrixLayout_t, cublasLtMatrixLayoutDestroy>;

// All that a choice of algorithm may depend on: operands lie packed, at multiples of 16 bytes (product.h).
using ProductKey = std::array<int64_t, 13>;
ProductKey key_of(const Product& p);

struct BlasAlgorithm {
  cublasLtMatmulAlgo_t words{};
  size_t workspace = 0;
};
// In one line, for the table of algorithms. Reading throws InputError.
std::string written(const BlasAlgorithm& a);
BlasAlgorithm read_algorithm(const std::string& text);

struct BlasPlan {
  explicit BlasPlan(const Product& p);
  // The addresses of what comes beside the matrices, before each run.
  void point_to(const Product& p) const;
  // What cuBLASLt proposes, the likely best first; none where it has no such product.
  std::vector<BlasAlgorithm> proposals(cublasLtHandle_t library, const Product& p) const;

  BlasOperation operation;
  BlasLayout left, right, out;
  BlasAlgorithm algorithm;
};

}  // namespace tessera::cuda
