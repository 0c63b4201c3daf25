// Products by cuBLASLt. What it has to know of a product is worked out once for each shape and what is transposed,
// and the algorithm is the fastest of its proposals, timed on the operands of the first call and kept
// (algorithm_table.h); or, where the arena's kernels are to be deterministic, the first of them.
//
// Of algorithms that split the inner dim only those are asked for that add the parts in a fixed order.
#include <cublasLt.h>
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <functional>
#include <limits>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "tensor/cuda/context.h"
#include "tensor/kernels.h"
#include "tensor/ops/matmul/cuda/algorithm_table.h"
#include "tensor/ops/matmul/cuda/driver/blaslt_plan.h"
#include "tensor/ops/matmul/cuda/product.h"

namespace tessera::cuda {
namespace {

constexpr int kRounds = 5;
constexpr double kClose = 1.25;  // proposals slower than that are timed twice only
constexpr auto kWarmUp = std::chrono::milliseconds(50);
constexpr const char* kApart = "apart";  // how such a choice begins; the times that decided it follow

std::string name_of(const ProductKey& key) {
  std::string name;
  for (const int64_t part : key) name += (name.empty() ? "" : " ") + std::to_string(part);
  return name;
}

bool is_capturing(Arena& arena) {
  cudaStreamCaptureStatus capturing{};
  check(cudaStreamIsCapturing(arena.local<Context>().stream(), &capturing), "matmul");
  return capturing != cudaStreamCaptureStatusNone;
}

class Blas {
 public:
  void multiply(Arena& arena, const Product& p) {
    const ProductKey key = key_of(p);
    auto found = plans_.find(key);
    if (found == plans_.end()) {
      BlasPlan plan(p);
      plan.algorithm = choose(arena, key, plan, p);
      found = plans_.emplace(key, std::move(plan)).first;
    }
    const BlasPlan& plan = found->second;
    plan.point_to(p);
    expect_blas(run(arena, plan, plan.algorithm, p), "product");
    arena.local<Context>().queued("matmul", cudaSuccess);
  }

  bool has_algorithm(const Product& p) {
    const ProductKey key = key_of(p);
    if (plans_.contains(key)) return true;
    const auto found = has_.find(key);
    return found != has_.end() ? found->second
                               : has_.emplace(key, !BlasPlan(p).proposals(library(), p).empty()).first->second;
  }

  // A way that is taken leaves its plan; one that is not, that word.
  bool is_faster(Arena& arena, const Way& fused, const Way& apart) {
    const ProductKey key = key_of(fused.product);
    if (plans_.contains(key)) return true;
    if (apart_.contains(key)) return false;
    BlasPlan plan(fused.product);
    const std::string choice = chosen_way(arena, key, plan, fused, apart);
    if (choice.starts_with(kApart)) {
      apart_.insert(key);
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

  cublasStatus_t run(Arena& arena, const BlasPlan& plan, const BlasAlgorithm& a, const Product& p) {
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

  std::vector<BlasAlgorithm> proposals(const BlasPlan& plan, const Product& p) {
    std::vector<BlasAlgorithm> all = plan.proposals(library(), p);
    if (all.empty())
      throw Error(fmt::format("[matmul] cuBLASLt has no algorithm for ({}, {}) x ({}, {}) of {}", p.n, p.k, p.k, p.m,
                              tessera::name_of(p.operands)));
    return all;
  }

  BlasAlgorithm choose(Arena& arena, const ProductKey& key, const BlasPlan& plan, const Product& p) {
    if (arena.local<KernelChoice>().deterministic) return proposals(plan, p).front();  // no clock decides
    AlgorithmTable& kept = table(arena);
    const std::string name = name_of(key);
    // What is being captured does not run, so nothing can be timed.
    if (is_capturing(arena)) return read_algorithm(kept.find_or_keep(name, written(proposals(plan, p).front())));
    if (const std::string known = kept.known(name); !known.empty()) return read_algorithm(known);
    arena.local<Context>().synchronize();  // before others wait for us: what is queued here may wait for them
    return read_algorithm(kept.find_or(name, [&] {
      const std::optional<Timed> best = fastest(arena, plan, proposals(plan, p), p);
      if (!best) throw Error("[matmul] none of the algorithms that cuBLASLt proposes runs", Status::communication);
      return written(best->algorithm);
    }));
  }

  std::string chosen_way(Arena& arena, const ProductKey& key, const BlasPlan& plan, const Way& fused,
                         const Way& apart) {
    AlgorithmTable& kept = table(arena);
    const std::string name = name_of(key);
    if (is_capturing(arena)) return kept.find_or_keep(name, kApart);
    if (const std::string known = kept.known(name); !known.empty()) return known;
    multiply(arena, apart.product);  // chooses for it, which must not be done within another choice
    arena.local<Context>().synchronize();
    const BlasPlan& other = plans_.at(key_of(apart.product));
    return kept.find_or(name, [&]() -> std::string {
      const std::optional<Timed> best = fastest(arena, plan, plan.proposals(library(), fused.product), fused.product);
      if (!best) return kApart;
      double with = std::numeric_limits<double>::infinity(), without = with;
      for (int round = 0; round < kRounds; ++round) {
        with = std::min(with, time(arena, plan, best->algorithm, fused.product, fused.rest));
        without = std::min(without, time(arena, other, other.algorithm, apart.product, apart.rest));
      }
      return with < without ? written(best->algorithm)
                            : fmt::format("{} {:.4f} ms, in one {:.4f} ms", kApart, without, with);
    });
  }

  struct Timed {
    BlasAlgorithm algorithm;
    double ms;
  };
  // Each of them twice in turn, then those that were close to the best; the least time counts. Nothing where none runs.
  std::optional<Timed> fastest(Arena& arena, const BlasPlan& plan, const std::vector<BlasAlgorithm>& algorithms,
                               const Product& p) {
    const auto nothing = [] {};
    std::vector<Timed> all;
    for (const BlasAlgorithm& a : algorithms) {
      if (run(arena, plan, a, p) == CUBLAS_STATUS_SUCCESS)
        all.push_back({a, std::numeric_limits<double>::infinity()});
      else
        cudaGetLastError();  // of a candidate that is dropped
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

  // A GPU that has been idle runs at a fraction of its clock, and what is timed first would look slow and stay so: the
  // choice is kept in a file. Once, before anything is timed.
  void warm_up(Arena& arena, const std::function<void()>& work) {
    using Clock = std::chrono::steady_clock;
    if (std::exchange(is_warm_, true)) return;
    for (const auto start = Clock::now(); Clock::now() - start < kWarmUp;) {
      for (int i = 0; i < 8; ++i) work();
      arena.local<Context>().synchronize();
    }
  }

  // Milliseconds of a product and what comes after it.
  double time(Arena& arena, const BlasPlan& plan, const BlasAlgorithm& a, const Product& p,
              const std::function<void()>& rest) {
    Context& c = arena.local<Context>();
    Event begin, end;
    check(cudaEventCreate(begin.receive()), "matmul");
    check(cudaEventCreate(end.receive()), "matmul");
    check(cudaEventRecord(begin.get(), c.stream()), "matmul");
    expect_blas(run(arena, plan, a, p), "product");
    rest();
    check(cudaEventRecord(end.get(), c.stream()), "matmul");
    check(cudaEventSynchronize(end.get()), "matmul");
    float ms = 0;
    check(cudaEventElapsedTime(&ms, begin.get(), end.get()), "matmul");
    return static_cast<double>(ms);
  }

  BlasLibrary library_;
  std::string device_;
  std::map<ProductKey, BlasPlan> plans_;
  bool is_warm_ = false;
  std::map<ProductKey, bool> has_;  // an algorithm, of products without a plan
  std::set<ProductKey> apart_;      // of products that are not to be made with what comes around them
};

}  // namespace

bool has_algorithm(Arena& arena, const Product& product) { return arena.local<Blas>().has_algorithm(product); }
void multiply(Arena& arena, const Product& product) { arena.local<Blas>().multiply(arena, product); }
bool is_faster(Arena& arena, const Way& fused, const Way& apart) {
  return arena.local<Blas>().is_faster(arena, fused, apart);
}

}  // namespace tessera::cuda
