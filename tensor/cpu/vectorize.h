// How a kernel reaches the machine's vector units, and the rank's threads.
//
// A kernel is an ordinary loop over scalar code. On x86-64 `vectorized(f)` runs it through one of three copies that the
// compiler made of it, for AVX-512, for AVX2 with FMA, and for the baseline; which one is decided by the processor that
// runs the program, so a binary built on a new machine runs on an old one. Other processors have the baseline alone: on
// 64-bit Arm it has the vectors of all such processors, with a fused multiply-add. Contraction is off and fused
// multiply-adds are written out, so an element gets the same bits in a vector body, in its tail, and on each of the
// copies. What only x86-64 has stands in folders named x86, which builds for other processors leave out.
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
// The whole call tree of f is inlined here and compiled for the named instruction set.
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

// The best instruction set that our kernels and oneDNN may use, for tests and comparisons: TESSERA_MAX_CPU_ISA=avx2,
// avx512, avx512_bf16 or amx (the default: all that the CPU has). Throws Error if it is set to anything else. Builds
// for other CPUs than x86-64 have one instruction set and do not read the variable.
enum class MaxIsa { avx2, avx512, avx512_bf16, amx };
MaxIsa max_isa();
// The best of the three copies that the CPU supports and max_isa() allows.
InstructionSet instruction_set();
// Whether this process may use the tiles of tensor/cpu/x86/amx.h.
bool has_amx();
// Whether the processor has AVX-512 with the pair products of bfloat16 (AVX512_BF16).
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

// A vector of the compiler's, which may lie at any element's address.
template <class T, int Bytes>
struct VectorOf {
  typedef T type __attribute__((vector_size(Bytes), aligned(sizeof(T)), may_alias));
};

// Threads of the calling rank: OpenMP's team size, which is a property of the calling thread, so ranks that are
// threads of one process each have their own.
inline int threads() { return omp_get_max_threads(); }
inline void set_threads(int n) { omp_set_num_threads(n); }

// While one lives, this thread computes nothing: ops take the memory that they would take and leave it as it is. So
// the memory that a model of any size would hold can be known on any machine (train/memory.h).
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

// Cuts [0, n) into one contiguous range per thread, at multiples of `grain`, and runs f(begin, end) on each. No thread
// is woken when there is only one grain of work.
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

// The same with f vectorised as a whole: for kernels whose range is one loop nest.
template <class F>
void parallel_for(int64_t n, int64_t grain, const F& f) {
  split(n, grain, [&](int64_t begin, int64_t end) { vectorized([&] { f(begin, end); }); });
}

// Elements below which a thread is not worth waking, for loops of a few operations per element.
inline constexpr int64_t kGrain = 8192;

}  // namespace tessera::cpu
