// How a kernel reaches the machine's vector units, and the rank's threads.
//
// A kernel is an ordinary loop over scalar code. `vectorized(f)` runs it through one of three copies that the compiler
// made of it, for AVX-512, for AVX2 with FMA, and for the baseline; which one is decided by the processor that runs the
// program, so a binary built on a new machine runs on an old one. Contraction is off and fused multiply-adds are
// written out, so an element gets the same bits in a vector body, in its tail, and on each of the three.
#pragma once
#include <omp.h>

#include <algorithm>
#include <cstdint>

namespace tessera::cpu {

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
template <class F>
[[gnu::noinline]] void run_baseline(const F& f) {
  f();
}

enum class InstructionSet { avx512, avx2, baseline };
// The best of the three that this processor has.
inline InstructionSet instruction_set() {
  if (__builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq"))
    return InstructionSet::avx512;
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return InstructionSet::avx2;
  return InstructionSet::baseline;
}

template <class F>
void vectorized(const F& f) {
  switch (instruction_set()) {
    case InstructionSet::avx512:
      return run_avx512(f);
    case InstructionSet::avx2:
      return run_avx2(f);
    case InstructionSet::baseline:
      return run_baseline(f);
  }
}

// Threads of the calling rank: OpenMP's team size, which is a property of the calling thread, so ranks that are
// threads of one process each have their own.
inline int threads() { return omp_get_max_threads(); }
inline void set_threads(int n) { omp_set_num_threads(n); }

// While one lives, this thread computes nothing: ops take the memory that they would take and leave it as it is. So
// the memory that a model of any size would hold can be known on any machine (train/memory.h).
class Idle {
 public:
  Idle() { here_ = true; }
  ~Idle() { here_ = false; }
  Idle(const Idle&) = delete;
  Idle& operator=(const Idle&) = delete;
  static bool here() { return here_; }

 private:
  static inline thread_local bool here_ = false;
};

// Cuts [0, n) into one contiguous range per thread, at multiples of `grain`, and runs f(begin, end) on each. No thread
// is woken when there is only one grain of work.
template <class F>
void split(int64_t n, int64_t grain, const F& f) {
  if (Idle::here()) return;
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
