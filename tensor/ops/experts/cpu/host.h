// What the loops over tokens of a mixture of experts have in common.
#pragma once
#include <algorithm>
#include <string>

#include "tensor/cpu/vectorize.h"
#include "tensor/tensor.h"

namespace tessera {

inline void check_on_host(const char* op, const Tensor& t) {
  if (t.device() == Device::cuda)
    throw Error(std::string("[") + op + "] experts have no kernels on a GPU; found " + t.describe() + " there");
}

inline int64_t tokens_together(int64_t width) {
  return std::max<int64_t>(1, cpu::kGrain / std::max<int64_t>(width, 1));
}

}  // namespace tessera
