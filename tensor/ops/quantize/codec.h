// The ways to hold a matrix in four bits: tensor/ops/quantize/quantize.h.
#pragma once
#include <cstdint>

namespace tessera {

enum class Codec : uint8_t { none, nf4, gptq };

}  // namespace tessera
