// What the loops over tokens of a mixture of experts have in common.
#pragma once
#include <algorithm>

#include "tensor/cpu/vectorize.h"

namespace tessera {

inline int64_t tokens_together(int64_t width) {
  return std::max<int64_t>(1, cpu::kGrain / std::max<int64_t>(width, 1));
}

}  // namespace tessera
