// Products by cuBLASLt. What it has to know of a product is worked out once for each shape, layout and alignment, and
// the algorithm is the fastest of its proposals, timed on the operands of the first call and kept (algorithm_table.h);
// or, where the arena's kernels are to be deterministic, the first of them.
//
// Of algorithms that split the inner dim only those are asked for that add the parts in a fixed order.
#include <cublasLt.h>
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <map>
#include <sstream>
#include <string>
#include <vector>

#include "tensor/cuda/algorithm_table.h"
#include "tensor/cuda/context.h"
#include "tensor/cuda/kernel_choice.h"
#include "tensor/cuda/matmul.h"

namespace tessera::cuda {
namespace {

constexpr int kProposals = 24, kRounds = 5;
constexpr uintptr_t kAlignment = 16;  // more is of no use to an algorithm: its widest load
constexpr double kClose = 1.25;       // proposals slower than that are timed once

void expect(cublasStatus_t status, const char* what) {
  if (status != CUBLAS_STATUS_SUCCESS)
    throw Error(fmt::format("[matmul] cuBLASLt: {}: {}", what, cublasLtGetStatusString(status)), Status::communication);
}

using Library = Handle<cublasLtHandle_t, cublasLtDestroy>;
using Operation = Handle<cublasLtMatmulDesc_t, cublasLtMatmulDescDestroy>;
using Layout = Handle<cublasLtMatrixLayout_t, cublasLtMatrixLayoutDestroy>;
using Preference = Handle<cublasLtMatmulPreference_t, cublasLtMatmulPreferenceDestroy>;

template <class T>
void set(const Operation& o, cublasLtMatmulDescAttributes_t attribute, const T& value) {
  expect(cublasLtMatmulDescSetAttribute(o.get(), attribute, &value, sizeof value), "operation");
}
template <class T>
void set(const Layout& l, cublasLtMatrixLayoutAttribute_t attribute, const T& value) {
  expect(cublasLtMatrixLayoutSetAttribute(l.get(), attribute, &value, sizeof value), "layout");
}
template <class T>
void set(const Preference& p, cublasLtMatmulPreferenceAttributes_t attribute, const T& value) {
  expect(cublasLtMatmulPreferenceSetAttribute(p.get(), attribute, &value, sizeof value), "preference");
}

cudaDataType_t type_of(DType dtype) {
  return dtype == DType::float64 ? CUDA_R_64F : dtype == DType::bfloat16 ? CUDA_R_16BF : CUDA_R_32F;
}
int64_t alignment(const std::byte* p) {
  const auto at = reinterpret_cast<uintptr_t>(p) | kAlignment;
  return static_cast<int64_t>(at & -at);
}

// All that a choice of algorithm may depend on.
using Key = std::array<int64_t, 21>;
Key key_of(const Product& p) {
  return {static_cast<int64_t>(p.operands),
          static_cast<int64_t>(p.result),
          p.tf32,
          p.m,
          p.n,
          p.k,
          p.batch,
          p.left.transposed,
          p.right.transposed,
          p.left.leading,
          p.right.leading,
          p.out.leading,
          p.batch > 1 ? p.left.step : 0,
          p.batch > 1 ? p.right.step : 0,
          p.batch > 1 ? p.out.step : 0,
          alignment(p.left.data),
          alignment(p.right.data),
          alignment(p.out.data),
          p.bias != nullptr,
          p.bias ? alignment(p.bias) : 0,
          kMostWorkspace};
}

Operation operation_of(const Product& p) {
  const cublasComputeType_t compute = p.operands == DType::float64 ? CUBLAS_COMPUTE_64F
                                      : p.tf32                     ? CUBLAS_COMPUTE_32F_FAST_TF32
                                                                   : CUBLAS_COMPUTE_32F;
  Operation o;
  expect(cublasLtMatmulDescCreate(o.receive(), compute, p.operands == DType::float64 ? CUDA_R_64F : CUDA_R_32F),
         "operation");
  set(o, CUBLASLT_MATMUL_DESC_TRANSA, p.left.transposed ? CUBLAS_OP_T : CUBLAS_OP_N);
  set(o, CUBLASLT_MATMUL_DESC_TRANSB, p.right.transposed ? CUBLAS_OP_T : CUBLAS_OP_N);
  if (p.bias) {
    set(o, CUBLASLT_MATMUL_DESC_EPILOGUE, CUBLASLT_EPILOGUE_BIAS);
    set(o, CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, type_of(p.result));
    set(o, CUBLASLT_MATMUL_DESC_BIAS_POINTER, p.bias);
  }
  return o;
}

Layout layout_of(const Matrices& m, DType dtype, int64_t rows, int64_t columns, int64_t batch) {
  if (m.transposed) std::swap(rows, columns);
  Layout l;
  expect(cublasLtMatrixLayoutCreate(l.receive(), type_of(dtype), static_cast<uint64_t>(rows),
                                    static_cast<uint64_t>(columns), m.leading),
         "layout");
  if (batch > 1) {
    set(l, CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, static_cast<int32_t>(batch));
    set(l, CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET, m.step);
  }
  return l;
}

Preference preference_of(const Product& p) {
  Preference preference;
  expect(cublasLtMatmulPreferenceCreate(preference.receive()), "preference");
  set(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, static_cast<size_t>(kMostWorkspace));
  set(preference, CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK,
      static_cast<uint32_t>(CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE));
  const auto out = static_cast<uint32_t>(alignment(p.out.data));
  set(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, static_cast<uint32_t>(alignment(p.left.data)));
  set(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, static_cast<uint32_t>(alignment(p.right.data)));
  set(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, out);
  set(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, out);
  return preference;
}

struct Algorithm {
  cublasLtMatmulAlgo_t words{};
  size_t workspace = 0;
};
std::string written(const Algorithm& a) {
  std::string text = std::to_string(a.workspace);
  for (const uint64_t word : a.words.data) text += fmt::format(" {:x}", word);
  return text;
}
Algorithm read(const std::string& text) {
  std::istringstream in(text);
  Algorithm a;
  in >> a.workspace >> std::hex;
  for (uint64_t& word : a.words.data) in >> word;
  if (!in || !(in >> std::ws).eof() || a.workspace > static_cast<size_t>(kMostWorkspace))
    throw InputError(fmt::format("[matmul] '{}' is no algorithm; without its file they are chosen anew", text));
  return a;
}

// One product as cuBLASLt knows it.
struct Plan {
  explicit Plan(const Product& p)
      : operation(operation_of(p)),
        left(layout_of(p.left, p.operands, p.m, p.k, p.batch)),
        right(layout_of(p.right, p.operands, p.k, p.n, p.batch)),
        out(layout_of(p.out, p.result, p.m, p.n, p.batch)) {}
  Operation operation;
  Layout left, right, out;
  Algorithm algorithm;
};

class Blas {
 public:
  void multiply(Arena& arena, const Product& p) {
    const Key key = key_of(p);
    auto found = plans_.find(key);
    if (found == plans_.end()) {
      Plan plan(p);
      plan.algorithm = choose(arena, key, plan, p);
      found = plans_.emplace(key, std::move(plan)).first;
    }
    const Plan& plan = found->second;
    if (p.bias) set(plan.operation, CUBLASLT_MATMUL_DESC_BIAS_POINTER, p.bias);
    expect(run(arena, plan, plan.algorithm, p), "product");
    arena.local<Context>().queued("matmul", cudaSuccess);
  }

 private:
  cublasLtHandle_t library() {
    if (!library_.get()) expect(cublasLtCreate(library_.receive()), "start");
    return library_.get();
  }

  cublasStatus_t run(Arena& arena, const Plan& plan, const Algorithm& a, const Product& p) {
    const float one = 1, zero = 0;
    const double one64 = 1, zero64 = 0;
    const bool wide = p.operands == DType::float64;
    // Given back when the product is queued: whoever has the block next is queued behind it.
    Tensor workspace;
    if (a.workspace > 0)
      workspace = Tensor::empty({static_cast<int64_t>(a.workspace / 4 + 1)}, DType::float32, arena.shared_from_this(),
                                Category::workspace);
    return cublasLtMatmul(library(), plan.operation.get(), wide ? static_cast<const void*>(&one64) : &one, p.left.data,
                          plan.left.get(), p.right.data, plan.right.get(),
                          wide ? static_cast<const void*>(&zero64) : &zero, p.out.data, plan.out.get(), p.out.data,
                          plan.out.get(), &a.words, a.workspace > 0 ? workspace.address() : nullptr, a.workspace,
                          arena.local<Context>().stream());
  }

  // What cuBLASLt proposes, the likely best first.
  std::vector<Algorithm> proposals(const Plan& plan, const Product& p) {
    std::array<cublasLtMatmulHeuristicResult_t, kProposals> found{};
    int count = 0;
    const Preference preference = preference_of(p);
    expect(cublasLtMatmulAlgoGetHeuristic(library(), plan.operation.get(), plan.left.get(), plan.right.get(),
                                          plan.out.get(), plan.out.get(), preference.get(), kProposals, found.data(),
                                          &count),
           "algorithms");
    std::vector<Algorithm> algorithms;
    for (int i = 0; i < count; ++i)
      if (const auto& f = found[static_cast<size_t>(i)]; f.state == CUBLAS_STATUS_SUCCESS)
        algorithms.push_back({f.algo, f.workspaceSize});
    if (algorithms.empty())
      throw Error(fmt::format("[matmul] cuBLASLt has no algorithm for ({}, {}) x ({}, {}) of {}", p.n, p.k, p.k, p.m,
                              name_of(p.operands)));
    return algorithms;
  }

  Algorithm choose(Arena& arena, const Key& key, const Plan& plan, const Product& p) {
    if (arena.local<KernelChoice>().deterministic) return proposals(plan, p).front();  // no clock decides
    Context& c = arena.local<Context>();
    if (device_.empty()) {
      cudaDeviceProp properties{};
      check(cudaGetDeviceProperties(&properties, c.gpu()), "matmul");
      device_ = fmt::format("{} cuBLASLt {}", properties.name, cublasLtGetVersion());
    }
    std::string name;
    for (const int64_t part : key) name += (name.empty() ? "" : " ") + std::to_string(part);
    AlgorithmTable& table = algorithm_table(device_);
    cudaStreamCaptureStatus capturing{};
    check(cudaStreamIsCapturing(c.stream(), &capturing), "matmul");
    // What is being captured does not run, so nothing can be timed.
    if (capturing != cudaStreamCaptureStatusNone)
      return read(table.find_or_keep(name, written(proposals(plan, p).front())));
    if (const std::string known = table.known(name); !known.empty()) return read(known);
    c.synchronize();  // before others wait for us: what is queued here may wait for them
    return read(table.find_or(name, [&] { return written(fastest(arena, plan, p)); }));
  }

  // Each proposal once, then those that were close to the best in turn; the least time counts.
  Algorithm fastest(Arena& arena, const Plan& plan, const Product& p) {
    struct Timed {
      Algorithm algorithm;
      float ms;
    };
    std::vector<Timed> all;
    for (const Algorithm& a : proposals(plan, p))
      if (run(arena, plan, a, p) == CUBLAS_STATUS_SUCCESS) all.push_back({a, time(arena, plan, a, p)});
    if (all.empty()) throw Error("[matmul] none of the algorithms that cuBLASLt proposes runs", Status::communication);
    const auto faster = [](const Timed& a, const Timed& b) { return a.ms < b.ms; };
    const double limit = kClose * static_cast<double>(std::min_element(all.begin(), all.end(), faster)->ms);
    for (int round = 0; round < kRounds; ++round)
      for (Timed& t : all)
        if (static_cast<double>(t.ms) <= limit) t.ms = std::min(t.ms, time(arena, plan, t.algorithm, p));
    return std::min_element(all.begin(), all.end(), faster)->algorithm;
  }

  float time(Arena& arena, const Plan& plan, const Algorithm& a, const Product& p) {
    Context& c = arena.local<Context>();
    Event begin, end;
    check(cudaEventCreate(begin.receive()), "matmul");
    check(cudaEventCreate(end.receive()), "matmul");
    check(cudaEventRecord(begin.get(), c.stream()), "matmul");
    expect(run(arena, plan, a, p), "product");
    check(cudaEventRecord(end.get(), c.stream()), "matmul");
    check(cudaEventSynchronize(end.get()), "matmul");
    float ms = 0;
    check(cudaEventElapsedTime(&ms, begin.get(), end.get()), "matmul");
    return ms;
  }

  Library library_;
  std::string device_;
  std::map<Key, Plan> plans_;
};

}  // namespace

void multiply(Arena& arena, const Product& product) { arena.local<Blas>().multiply(arena, product); }

}  // namespace tessera::cuda
