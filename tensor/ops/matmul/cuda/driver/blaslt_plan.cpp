// Descriptors, and what of a product they are made of.
#include "tensor/ops/matmul/cuda/driver/blaslt_plan.h"

#include <fmt/format.h>

#include <sstream>
#include <utility>

#include "tensor/error.h"

namespace tessera::cuda {
namespace {

// Proposals that are asked for. Of those with the gradient of GELU the likely best are old kernels, slower than a plain
// product's; if there are better ones, they come later.
int proposals_of(const Product& p) { return p.epilogue == Epilogue::gelu_gradient ? 128 : 24; }
constexpr uint32_t kAlignment = 16;  // of all operands; more is of no use to an algorithm: its widest load

using Preference = Handle<cublasLtMatmulPreference_t, cublasLtMatmulPreferenceDestroy>;

template <class T>
void set(const BlasOperation& o, cublasLtMatmulDescAttributes_t attribute, const T& value) {
  expect_blas(cublasLtMatmulDescSetAttribute(o.get(), attribute, &value, sizeof value), "operation");
}
template <class T>
void set(const BlasLayout& l, cublasLtMatrixLayoutAttribute_t attribute, const T& value) {
  expect_blas(cublasLtMatrixLayoutSetAttribute(l.get(), attribute, &value, sizeof value), "layout");
}
template <class T>
void set(const Preference& p, cublasLtMatmulPreferenceAttributes_t attribute, const T& value) {
  expect_blas(cublasLtMatmulPreferenceSetAttribute(p.get(), attribute, &value, sizeof value), "preference");
}

cudaDataType_t type_of(DType dtype) {
  return dtype == DType::float64 ? CUDA_R_64F : dtype == DType::bfloat16 ? CUDA_R_16BF : CUDA_R_32F;
}

cublasLtEpilogue_t epilogue_of(const Product& p) {
  if (p.epilogue == Epilogue::gelu) return p.bias ? CUBLASLT_EPILOGUE_GELU_AUX_BIAS : CUBLASLT_EPILOGUE_GELU_AUX;
  if (p.epilogue == Epilogue::gelu_gradient) return CUBLASLT_EPILOGUE_DGELU;
  if (p.sums) return CUBLASLT_EPILOGUE_BGRADB;
  return p.bias ? CUBLASLT_EPILOGUE_BIAS : CUBLASLT_EPILOGUE_DEFAULT;
}

BlasOperation operation_of(const Product& p) {
  const cublasComputeType_t compute = p.operands == DType::float64 ? CUBLAS_COMPUTE_64F
                                      : p.tf32                     ? CUBLAS_COMPUTE_32F_FAST_TF32
                                                                   : CUBLAS_COMPUTE_32F;
  BlasOperation o;
  expect_blas(cublasLtMatmulDescCreate(o.receive(), compute, p.operands == DType::float64 ? CUDA_R_64F : CUDA_R_32F),
              "operation");
  set(o, CUBLASLT_MATMUL_DESC_TRANSA, p.left.transposed ? CUBLAS_OP_T : CUBLAS_OP_N);
  set(o, CUBLASLT_MATMUL_DESC_TRANSB, p.right.transposed ? CUBLAS_OP_T : CUBLAS_OP_N);
  set(o, CUBLASLT_MATMUL_DESC_EPILOGUE, epilogue_of(p));
  if (p.bias || p.sums) set(o, CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, type_of(p.result));
  if (p.epilogue != Epilogue::none) set(o, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, p.aux.leading);
  return o;
}

BlasLayout layout_of(const Matrices& m, DType dtype, int64_t rows, int64_t columns, int64_t batch) {
  if (m.transposed) std::swap(rows, columns);
  BlasLayout l;
  expect_blas(cublasLtMatrixLayoutCreate(l.receive(), type_of(dtype), static_cast<uint64_t>(rows),
                                         static_cast<uint64_t>(columns), m.leading),
              "layout");
  if (batch > 1) {
    set(l, CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, static_cast<int32_t>(batch));
    set(l, CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET, m.step);
  }
  return l;
}

Preference preference_of() {
  Preference preference;
  expect_blas(cublasLtMatmulPreferenceCreate(preference.receive()), "preference");
  set(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, static_cast<size_t>(kMostWorkspace));
  set(preference, CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK,
      static_cast<uint32_t>(CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE));
  for (const auto whose : {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
                           CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES})
    set(preference, whose, kAlignment);
  return preference;
}

}  // namespace

void expect_blas(cublasStatus_t status, const char* what) {
  if (status != CUBLAS_STATUS_SUCCESS)
    throw Error(fmt::format("[matmul] cuBLASLt: {}: {}", what, cublasLtGetStatusString(status)), Status::communication);
}

ProductKey key_of(const Product& p) {
  return {static_cast<int64_t>(p.operands),
          static_cast<int64_t>(p.result),
          p.tf32,
          p.m,
          p.n,
          p.k,
          p.batch,
          p.left.transposed,
          p.right.transposed,
          p.bias != nullptr,
          p.sums != nullptr,
          static_cast<int64_t>(p.epilogue),
          kMostWorkspace};
}

std::string written(const BlasAlgorithm& a) {
  std::string text = std::to_string(a.workspace);
  for (const uint64_t word : a.words.data) text += fmt::format(" {:x}", word);
  return text;
}

BlasAlgorithm read_algorithm(const std::string& text) {
  std::istringstream in(text);
  BlasAlgorithm a;
  in >> a.workspace >> std::hex;
  for (uint64_t& word : a.words.data) in >> word;
  if (!in || !(in >> std::ws).eof() || a.workspace > static_cast<size_t>(kMostWorkspace))
    throw InputError(fmt::format("[matmul] '{}' is no algorithm; without its file they are chosen anew", text));
  return a;
}

BlasPlan::BlasPlan(const Product& p)
    : operation(operation_of(p)),
      left(layout_of(p.left, p.operands, p.m, p.k, p.batch)),
      right(layout_of(p.right, p.operands, p.k, p.n, p.batch)),
      out(layout_of(p.out, p.result, p.m, p.n, p.batch)) {
  point_to(p);  // proposals look at how it is aligned
}

void BlasPlan::point_to(const Product& p) const {
  if (p.bias) set(operation, CUBLASLT_MATMUL_DESC_BIAS_POINTER, p.bias);
  if (p.sums) set(operation, CUBLASLT_MATMUL_DESC_BIAS_POINTER, p.sums);
  if (p.epilogue != Epilogue::none) set(operation, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, p.aux.data);
}

std::vector<BlasAlgorithm> BlasPlan::proposals(cublasLtHandle_t library, const Product& p) const {
  std::vector<cublasLtMatmulHeuristicResult_t> found(static_cast<size_t>(proposals_of(p)));
  int count = 0;
  const Preference preference = preference_of();
  const cublasStatus_t status =
      cublasLtMatmulAlgoGetHeuristic(library, operation.get(), left.get(), right.get(), out.get(), out.get(),
                                     preference.get(), proposals_of(p), found.data(), &count);
  if (status == CUBLAS_STATUS_NOT_SUPPORTED || status == CUBLAS_STATUS_INVALID_VALUE) return {};
  expect_blas(status, "algorithms");
  std::vector<BlasAlgorithm> algorithms;
  for (int i = 0; i < count; ++i)
    if (const auto& f = found[static_cast<size_t>(i)]; f.state == CUBLAS_STATUS_SUCCESS)
      algorithms.push_back({f.algo, f.workspaceSize});
  return algorithms;
}

}  // namespace tessera::cuda
