// What a kernel does with an index that it was given.
#pragma once
#include "tensor/cuda/indices.h"

namespace tessera::cuda {

// Whether `value` may be used. It stands at `place` among its like, below 2^32.
__device__ inline bool inside(const Bounds& bounds, int64_t place, int32_t value) {
  if (value >= 0 && value < bounds.limit) return true;
  atomicMin(bounds.first, static_cast<unsigned long long>(place) << 32 | static_cast<uint32_t>(value));
  return false;
}

}  // namespace tessera::cuda
