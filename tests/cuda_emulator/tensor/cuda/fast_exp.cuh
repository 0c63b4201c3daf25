// Stands in for tensor/cuda/fast_exp.cuh.
#pragma once
#include <cmath>

namespace tessera::cuda {

inline float fast_exp2(float x) { return std::exp2(x); }

}  // namespace tessera::cuda
