// Dispatch to the CPU's vector units and the rank's threads.
//
// On x86-64 `vectorized(f)` runs one of three copies of a scalar loop, compiled for AVX-512, AVX2 with FMA, and the
// baseline, selected at run time. On 64-bit Arm the baseline includes vectors and FMA. Contraction is off and fused
// multiply-adds are explicit, so results are bitwise identical in vector body, tail and all copies.
#pragma once
#include <omp.h>

#include <algorithm>
#include <cstdint>

namespace tessera::cpu {

enum class InstructionSet { avx512, avx2, baseline };

template <class F>
[[gnu::noinline]] void run_baseline(const F& f) {
  f();
}

#ifdef __x86_64__
// Inlines f's call tree and compiles it for the instruction set.
template <class F>
#ifdef __clang__
[[gnu::target("arch=x86-64-v4"), gnu::flatten, gnu::noinline]]
#else
[[gnu::target("arch=x86-64-v4,prefer-vector-width=512"), gnu::flatten, gnu::noinline]]
#endif
void run_avx512(const F& f) {
  f();
}
template <class F>
[[gnu::target("arch=x86-64-v3"), gnu::flatten, gnu::noinline]] void run_avx2(const F& f) {
  f();
}

// Upper bound on the instruction sets of Tessera's kernels and oneDNN: TESSERA_MAX_CPU_ISA=avx2, avx512, avx512_bf16 or
// amx (default: no limit). Throws Error for other values. Ignored on other architectures.
enum class MaxIsa { avx2, avx512, avx512_bf16, amx };
MaxIsa max_isa();
InstructionSet instruction_set();
bool has_amx();
// Whether the CPU has AVX512_BF16.
bool has_pair_products();

template <class F>
void run_on(InstructionSet set, const F& f) {
  switch (set) {
    case InstructionSet::avx512:
      return run_avx512(f);
    case InstructionSet::avx2:
      return run_avx2(f);
    case InstructionSet::baseline:
      return run_baseline(f);
  }
}
#else
inline InstructionSet instruction_set() { return InstructionSet::baseline; }
inline bool has_amx() { return false; }
inline bool has_pair_products() { return false; }

template <class F>
void run_on(InstructionSet /*set*/, const F& f) {
  run_baseline(f);
}
#endif

template <class F>
void vectorized(const F& f) {
  run_on(instruction_set(), f);
}

// Requires only element alignment.
template <class T, int Bytes>
struct VectorOf {
  typedef T type __attribute__((vector_size(Bytes), aligned(sizeof(T)), may_alias));
};

// OpenMP's team size is per calling thread, so each rank of a process has its own team.
inline int threads() { return omp_get_max_threads(); }
inline void set_threads(int n) { omp_set_num_threads(n); }

// While an instance exists, ops on this thread allocate but do not compute, which predicts the memory of models of any
// size (train/memory.h).
class DryRun {
 public:
  DryRun() { here_ = true; }
  ~DryRun() { here_ = false; }
  DryRun(const DryRun&) = delete;
  DryRun& operator=(const DryRun&) = delete;
  static bool here() { return here_; }

 private:
  static inline thread_local bool here_ = false;
};

// Runs f(begin, end) on one contiguous range of [0, n) per thread, split at multiples of `grain`; a single grain wakes
// no thread.
template <class F>
void split(int64_t n, int64_t grain, const F& f) {
  if (DryRun::here()) return;
  const int64_t grains = (n + grain - 1) / grain;
  const int64_t team = std::min<int64_t>(threads(), grains);
  if (team <= 1) {
    if (n > 0) f(int64_t{0}, n);
    return;
  }
#pragma omp parallel for num_threads(static_cast <int>(team)) schedule(static)
  for (int64_t t = 0; t < team; ++t) {
    const int64_t begin = t * grains / team * grain, end = std::min(n, (t + 1) * grains / team * grain);
    if (begin < end) f(begin, end);
  }
}

// split() with f vectorized, for a range processed by one loop nest.
template <class F>
void parallel_for(int64_t n, int64_t grain, const F& f) {
  split(n, grain, [&](int64_t begin, int64_t end) { vectorized([&] { f(begin, end); }); });
}

// Number of elements that amortizes waking a thread, at a few operations per element.
inline constexpr int64_t kGrain = 8192;

}  // namespace tessera::cpu
