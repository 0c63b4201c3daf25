// cuBLASLt GEMMs: operation and layout descriptors, and algorithm selection.
#include <cublasLt.h>
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdint>
#include <functional>
#include <limits>
#include <map>
#include <optional>
#include <set>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "base/error.h"
#include "tensor/cuda/context.h"
#include "tensor/kernels.h"
#include "tensor/ops/matmul/cuda/algorithm_table.h"
#include "tensor/ops/matmul/cuda/gemm.h"

namespace tessera::cuda {
namespace {

using BlasLibrary = Handle<cublasLtHandle_t, cublasLtDestroy>;
using BlasOperation = Handle<cublasLtMatmulDesc_t, cublasLtMatmulDescDestroy>;
using BlasLayout = Handle<cublasLtMatrixLayout_t, cublasLtMatrixLayoutDestroy>;

// Operands are packed and aligned to 16 bytes (gemm.h), so nothing else affects the choice.
using GemmKey = std::array<int64_t, 13>;

struct BlasAlgorithm {
  cublasLtMatmulAlgo_t words{};
  size_t workspace = 0;
};

void expect_blas(cublasStatus_t status, const char* what) {
  if (status != CUBLAS_STATUS_SUCCESS)
    throw Error(fmt::format("[matmul] cuBLASLt: {}: {}", what, cublasLtGetStatusString(status)), Status::communication);
}

GemmKey cache_key(const GemmProblem& p) {
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
          kMaxWorkspace};
}

// Single-line form for the algorithm table. Parsing throws InputError.
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
  if (!in || !(in >> std::ws).eof() || a.workspace > static_cast<size_t>(kMaxWorkspace))
    throw InputError(
        fmt::format("[matmul] '{}' is not an algorithm; delete its file to time the algorithms again", text));
  return a;
}

// With the GELU gradient as epilogue, cuBLASLt first proposes old kernels, which are slower than those for a plain
// GEMM; faster ones, if any, follow.
int count_proposals(const GemmProblem& p) { return p.epilogue == Epilogue::gelu_gradient ? 128 : 24; }
// In bytes, for all operands: the widest load of any algorithm.
constexpr uint32_t kAlignment = 16;

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

cudaDataType_t to_cuda_type(DType dtype) {
  return dtype == DType::float64 ? CUDA_R_64F : dtype == DType::bfloat16 ? CUDA_R_16BF : CUDA_R_32F;
}

cublasLtEpilogue_t to_cublas_epilogue(const GemmProblem& p) {
  if (p.epilogue == Epilogue::gelu) return p.bias ? CUBLASLT_EPILOGUE_GELU_AUX_BIAS : CUBLASLT_EPILOGUE_GELU_AUX;
  if (p.epilogue == Epilogue::gelu_gradient) return CUBLASLT_EPILOGUE_DGELU;
  if (p.sums) return CUBLASLT_EPILOGUE_BGRADB;
  return p.bias ? CUBLASLT_EPILOGUE_BIAS : CUBLASLT_EPILOGUE_DEFAULT;
}

BlasOperation to_blas_operation(const GemmProblem& p) {
  const cublasComputeType_t compute = p.operands == DType::float64 ? CUBLAS_COMPUTE_64F
                                      : p.tf32                     ? CUBLAS_COMPUTE_32F_FAST_TF32
                                                                   : CUBLAS_COMPUTE_32F;
  BlasOperation o;
  expect_blas(cublasLtMatmulDescCreate(o.receive(), compute, p.operands == DType::float64 ? CUDA_R_64F : CUDA_R_32F),
              "operation");
  set(o, CUBLASLT_MATMUL_DESC_TRANSA, p.left.transposed ? CUBLAS_OP_T : CUBLAS_OP_N);
  set(o, CUBLASLT_MATMUL_DESC_TRANSB, p.right.transposed ? CUBLAS_OP_T : CUBLAS_OP_N);
  set(o, CUBLASLT_MATMUL_DESC_EPILOGUE, to_cublas_epilogue(p));
  if (p.bias || p.sums) set(o, CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, to_cuda_type(p.result));
  if (p.epilogue != Epilogue::none) set(o, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, p.aux.leading);
  return o;
}

BlasLayout to_blas_layout(const Matrices& m, DType dtype, int64_t rows, int64_t columns, int64_t batch) {
  if (m.transposed) std::swap(rows, columns);
  BlasLayout l;
  expect_blas(cublasLtMatrixLayoutCreate(l.receive(), to_cuda_type(dtype), static_cast<uint64_t>(rows),
                                         static_cast<uint64_t>(columns), m.leading),
              "layout");
  if (batch > 1) {
    set(l, CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, static_cast<int32_t>(batch));
    set(l, CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET, m.step);
  }
  return l;
}

Preference make_preference() {
  Preference preference;
  expect_blas(cublasLtMatmulPreferenceCreate(preference.receive()), "preference");
  set(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, static_cast<size_t>(kMaxWorkspace));
  set(preference, CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK,
      static_cast<uint32_t>(CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE));
  for (const auto whose : {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
                           CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES})
    set(preference, whose, kAlignment);
  return preference;
}

struct BlasPlan {
  explicit BlasPlan(const GemmProblem& p)
      : operation(to_blas_operation(p)),
        left(to_blas_layout(p.left, p.operands, p.m, p.k, p.batch)),
        right(to_blas_layout(p.right, p.operands, p.k, p.n, p.batch)),
        out(to_blas_layout(p.out, p.result, p.m, p.n, p.batch)) {
    point_to(p);  // the heuristic considers pointer alignment
  }

  void point_to(const GemmProblem& p) const {
    if (p.bias) set(operation, CUBLASLT_MATMUL_DESC_BIAS_POINTER, p.bias);
    if (p.sums) set(operation, CUBLASLT_MATMUL_DESC_BIAS_POINTER, p.sums);
    if (p.epilogue != Epilogue::none) set(operation, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, p.aux.data);
  }

  // Best first; empty if the problem is unsupported.
  std::vector<BlasAlgorithm> proposals(cublasLtHandle_t library, const GemmProblem& p) const {
    std::vector<cublasLtMatmulHeuristicResult_t> found(static_cast<size_t>(count_proposals(p)));
    int count = 0;
    const Preference preference = make_preference();
    const cublasStatus_t status =
        cublasLtMatmulAlgoGetHeuristic(library, operation.get(), left.get(), right.get(), out.get(), out.get(),
                                       preference.get(), count_proposals(p), found.data(), &count);
    if (status == CUBLAS_STATUS_NOT_SUPPORTED || status == CUBLAS_STATUS_INVALID_VALUE) return {};
    expect_blas(status, "algorithms");
    std::vector<BlasAlgorithm> algorithms;
    for (int i = 0; i < count; ++i)
      if (const auto& f = found[static_cast<size_t>(i)]; f.state == CUBLAS_STATUS_SUCCESS)
        algorithms.push_back({f.algo, f.workspaceSize});
    return algorithms;
  }

  BlasOperation operation;
  BlasLayout left, right, out;
  BlasAlgorithm algorithm;
};

// Descriptors are created once per problem. The algorithm is the fastest proposal, timed on the operands of the first
// call and cached (algorithm_table.h); in deterministic mode it is the first proposal. Algorithms that split the inner
// dim are requested only with a fixed reduction order.

constexpr int kRounds = 5;
constexpr double kClose = 1.25;  // proposals slower than the fastest by this factor are timed only twice
constexpr auto kWarmUp = std::chrono::milliseconds(50);
constexpr const char* kSeparate = "apart";  // prefix of the choice not to fuse; followed by the timings

std::string to_string(const GemmKey& key) {
  std::string name;
  for (const int64_t field : key) name += (name.empty() ? "" : " ") + std::to_string(field);
  return name;
}

bool is_capturing(Arena& arena) {
  cudaStreamCaptureStatus capturing{};
  check(cudaStreamIsCapturing(arena.local<Context>().stream(), &capturing), "matmul");
  return capturing != cudaStreamCaptureStatusNone;
}

class Blas {
 public:
  void multiply(Arena& arena, const GemmProblem& p) {
    const GemmKey key = cache_key(p);
    auto found = plans_.find(key);
    if (found == plans_.end()) {
      BlasPlan plan(p);
      plan.algorithm = choose(arena, key, plan, p);
      found = plans_.emplace(key, std::move(plan)).first;
    }
    const BlasPlan& plan = found->second;
    plan.point_to(p);
    expect_blas(run(arena, plan, plan.algorithm, p), "matmul");
    arena.local<Context>().queued("matmul", cudaSuccess);
  }

  bool has_algorithm(const GemmProblem& p) {
    const GemmKey key = cache_key(p);
    if (plans_.contains(key)) return true;
    const auto found = has_.find(key);
    return found != has_.end() ? found->second
                               : has_.emplace(key, !BlasPlan(p).proposals(library(), p).empty()).first->second;
  }

  // If the fused path is chosen, its plan is stored in plans_, otherwise the key in separate_.
  bool is_faster(Arena& arena, const GemmPath& fused, const GemmPath& separate) {
    const GemmKey key = cache_key(fused.problem);
    if (plans_.contains(key)) return true;
    if (separate_.contains(key)) return false;
    BlasPlan plan(fused.problem);
    const std::string choice = choose_path(arena, key, plan, fused, separate);
    if (choice.starts_with(kSeparate)) {
      separate_.insert(key);
      return false;
    }
    plan.algorithm = read_algorithm(choice);
    plans_.emplace(key, std::move(plan));
    return true;
  }

 private:
  cublasLtHandle_t library() {
    if (!library_.get()) expect_blas(cublasLtCreate(library_.receive()), "start");
    return library_.get();
  }

  AlgorithmTable& table(Arena& arena) {
    if (device_.empty()) {
      cudaDeviceProp properties{};
      check(cudaGetDeviceProperties(&properties, arena.local<Context>().gpu()), "matmul");
      device_ = fmt::format("{} cuBLASLt {}", properties.name, cublasLtGetVersion());
    }
    return algorithm_table(device_);
  }

  cublasStatus_t run(Arena& arena, const BlasPlan& plan, const BlasAlgorithm& a, const GemmProblem& p) {
    const float one = 1, zero = 0;
    const double one64 = 1, zero64 = 0;
    const bool wide = p.operands == DType::float64;
    // Freed as soon as the GEMM is queued: the block's next use is queued after it.
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

  std::vector<BlasAlgorithm> proposals(const BlasPlan& plan, const GemmProblem& p) {
    std::vector<BlasAlgorithm> all = plan.proposals(library(), p);
    if (all.empty())
      throw Error(fmt::format("[matmul] cuBLASLt has no algorithm for ({}, {}) x ({}, {}) in {}", p.n, p.k, p.k, p.m,
                              tessera::to_string(p.operands)));
    return all;
  }

  BlasAlgorithm choose(Arena& arena, const GemmKey& key, const BlasPlan& plan, const GemmProblem& p) {
    if (arena.local<KernelChoice>().deterministic) return proposals(plan, p).front();  // independent of timing
    AlgorithmTable& choices = table(arena);
    const std::string name = to_string(key);
    // Captured work does not run, so it cannot be timed.
    if (is_capturing(arena)) return read_algorithm(choices.find_or_insert(name, written(proposals(plan, p).front())));
    if (const std::string known = choices.known(name); !known.empty()) return read_algorithm(known);
    // Synchronize before taking the lock: other ranks may wait for the lock, and work queued here may wait for those
    // ranks.
    arena.local<Context>().synchronize();
    return read_algorithm(choices.find_or(name, [&] {
      const std::optional<Timed> best = fastest(arena, plan, proposals(plan, p), p);
      if (!best) throw Error("[matmul] none of the algorithms proposed by cuBLASLt runs", Status::communication);
      return written(best->algorithm);
    }));
  }

  std::string choose_path(Arena& arena, const GemmKey& key, const BlasPlan& plan, const GemmPath& fused,
                          const GemmPath& separate) {
    AlgorithmTable& choices = table(arena);
    const std::string name = to_string(key);
    if (is_capturing(arena)) return choices.find_or_insert(name, kSeparate);
    if (const std::string known = choices.known(name); !known.empty()) return known;
    multiply(arena, separate.problem);  // selects its algorithm now: selections must not nest
    arena.local<Context>().synchronize();
    const BlasPlan& other = plans_.at(cache_key(separate.problem));
    return choices.find_or(name, [&]() -> std::string {
      const std::optional<Timed> best = fastest(arena, plan, plan.proposals(library(), fused.problem), fused.problem);
      if (!best) return kSeparate;
      double with = std::numeric_limits<double>::infinity(), without = with;
      for (int round = 0; round < kRounds; ++round) {
        with = std::min(with, time(arena, plan, best->algorithm, fused.problem, fused.rest));
        without = std::min(without, time(arena, other, other.algorithm, separate.problem, separate.rest));
      }
      return with < without ? written(best->algorithm)
                            : fmt::format("{} {:.4f} ms, fused {:.4f} ms", kSeparate, without, with);
    });
  }

  struct Timed {
    BlasAlgorithm algorithm;
    double ms;
  };
  // Times all algorithms twice in alternation, then those close to the best again; returns the minimum. Empty if none
  // runs.
  std::optional<Timed> fastest(Arena& arena, const BlasPlan& plan, const std::vector<BlasAlgorithm>& algorithms,
                               const GemmProblem& p) {
    const auto nothing = [] {};
    std::vector<Timed> all;
    for (const BlasAlgorithm& a : algorithms) {
      if (run(arena, plan, a, p) == CUBLAS_STATUS_SUCCESS)
        all.push_back({a, std::numeric_limits<double>::infinity()});
      else
        cudaGetLastError();  // clears the error of a rejected candidate
    }
    if (all.empty()) return std::nullopt;
    warm_up(arena, [&] { run(arena, plan, all.front().algorithm, p); });
    for (int round = 0; round < 2; ++round)
      for (Timed& t : all) t.ms = std::min(t.ms, time(arena, plan, t.algorithm, p, nothing));
    const auto faster = [](const Timed& a, const Timed& b) { return a.ms < b.ms; };
    const double limit = kClose * std::min_element(all.begin(), all.end(), faster)->ms;
    for (int round = 0; round < kRounds; ++round)
      for (Timed& t : all)
        if (t.ms <= limit) t.ms = std::min(t.ms, time(arena, plan, t.algorithm, p, nothing));
    return *std::min_element(all.begin(), all.end(), faster);
  }

  // Warms up once, before any timing: an idle GPU runs at reduced clocks, which would mistime the first candidate.
  void warm_up(Arena& arena, const std::function<void()>& work) {
    using Clock = std::chrono::steady_clock;
    if (std::exchange(is_warm_, true)) return;
    for (const auto start = Clock::now(); Clock::now() - start < kWarmUp;) {
      for (int i = 0; i < 8; ++i) work();
      arena.local<Context>().synchronize();
    }
  }

  // In milliseconds.
  double time(Arena& arena, const BlasPlan& plan, const BlasAlgorithm& a, const GemmProblem& p,
              const std::function<void()>& rest) {
    Context& c = arena.local<Context>();
    Event begin, end;
    check(cudaEventCreate(begin.receive()), "matmul");
    check(cudaEventCreate(end.receive()), "matmul");
    check(cudaEventRecord(begin.get(), c.stream()), "matmul");
    expect_blas(run(arena, plan, a, p), "matmul");
    rest();
    check(cudaEventRecord(end.get(), c.stream()), "matmul");
    check(cudaEventSynchronize(end.get()), "matmul");
    float ms = 0;
    check(cudaEventElapsedTime(&ms, begin.get(), end.get()), "matmul");
    return static_cast<double>(ms);
  }

  BlasLibrary library_;
  std::string device_;
  std::map<GemmKey, BlasPlan> plans_;
  bool is_warm_ = false;
  std::map<GemmKey, bool> has_;  // whether an algorithm exists, for problems without a plan
  std::set<GemmKey> separate_;   // problems not fused with adjacent passes
};

}  // namespace

bool has_algorithm(Arena& arena, const GemmProblem& problem) { return arena.local<Blas>().has_algorithm(problem); }
void multiply(Arena& arena, const GemmProblem& problem) { arena.local<Blas>().multiply(arena, problem); }
bool is_faster(Arena& arena, const GemmPath& fused, const GemmPath& separate) {
  return arena.local<Blas>().is_faster(arena, fused, separate);
}

}  // namespace tessera::cuda
