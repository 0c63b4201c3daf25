// Stored numbers in another dtype, rounded once.
#pragma once
#include <span>

#include "data/safetensors.h"

namespace tessera {

// Elements of `from`, floating or float16, from the one at `begin` on, as many of `dtype` as `to` has room for.
void convert(const TensorBytes& from, int64_t begin, DType dtype, std::span<std::byte> to);
// The same of its transpose; `from` has two dims.
void convert_transposed(const TensorBytes& from, int64_t begin, DType dtype, std::span<std::byte> to);

}  // namespace tessera
