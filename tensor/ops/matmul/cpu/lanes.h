// Vectors of the CPU's GEMMs for each instruction set, and their selection at run time.
#pragma once
#include <cstdint>

#include "tensor/cpu/vectorize.h"
#include "tensor/math.h"
#ifdef __x86_64__
#include "tensor/ops/matmul/cpu/x86/lanes.h"
#endif

namespace tessera::cpu {

inline constexpr int64_t kSumLanes = 16;

// For the baseline instruction set (vectorize.h); x86/lanes.h has bitwise identical versions for other x86-64
// instruction sets. scaled_add(): c += s b on one vector of kBytes. Lanes: sixteen float32. fma(): sum += a b. total():
// the sum of the lanes, added in pairs l and l + 8, then l and l + 4, and so on.
struct Baseline {
  static constexpr int kBytes = 16;
  static void scaled_add(VectorOf<float, 16>::type& c, float s, const VectorOf<float, 16>::type& b) {
    for (int l = 0; l < 4; ++l) c[l] = math::fma(s, b[l], c[l]);
  }
  static void scaled_add(VectorOf<double, 16>::type& c, double s, const VectorOf<double, 16>::type& b) {
    for (int l = 0; l < 2; ++l) c[l] = math::fma(s, b[l], c[l]);
  }
  struct Lanes {
    float lane[kSumLanes];
  };
  template <class T>
  static void load(Lanes& to, const T* p) {
    for (int l = 0; l < kSumLanes; ++l) to.lane[l] = static_cast<float>(p[l]);
  }
  static void fma(Lanes& sum, const Lanes& a, const Lanes& b) {
    for (int l = 0; l < kSumLanes; ++l) sum.lane[l] = math::fma(a.lane[l], b.lane[l], sum.lane[l]);
  }
  static float total(Lanes sum) {
    for (int64_t width = kSumLanes / 2; width > 0; width /= 2)
      for (int64_t l = 0; l < width; ++l) sum.lane[l] += sum.lane[l + width];
    return sum.lane[0];
  }
};

template <class F>
void run_for([[maybe_unused]] InstructionSet isa, const F& f) {
#ifdef __x86_64__
  if (isa == InstructionSet::avx512) return run_avx512([f] { f(Avx512{}); });
  if (isa == InstructionSet::avx2) return run_avx2([f] { f(Avx2{}); });
#endif
  run_baseline([f] { f(Baseline{}); });
}

}  // namespace tessera::cpu
