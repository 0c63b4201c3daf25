// IEEE's float16 as bits that files hold; no tensor has it.
#pragma once
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>

namespace tessera {

struct Half {
  uint16_t bits = 0;
};

// Every float16 is a float.
constexpr float wide(Half h) {
  const uint32_t sign = static_cast<uint32_t>(h.bits & 0x8000u) << 16, exponent = (h.bits >> 10) & 0x1fu,
                 fraction = h.bits & 0x3ffu;
  if (exponent == 0) return (sign != 0 ? -0x1p-24F : 0x1p-24F) * static_cast<float>(fraction);
  const uint32_t biased = exponent == 0x1fu ? 0xffu : exponent + 112;
  return std::bit_cast<float>(sign | biased << 23 | fraction << 13);
}

// Rounded to nearest, ties to even; what is too large becomes infinite. Not for a NaN.
inline Half half_of(float x) {
  const auto sign = static_cast<uint16_t>(std::bit_cast<uint32_t>(x) >> 16 & 0x8000u);
  const float magnitude = std::abs(x);
  if (magnitude >= 65520.0F) return {static_cast<uint16_t>(sign | 0x7c00u)};
  int exponent = 0;
  std::frexp(magnitude, &exponent);                                     // magnitude = f 2^exponent with f in [0.5, 1)
  const int step = magnitude > 0 ? std::max(exponent - 11, -24) : -24;  // what one of the last bit counts
  const auto count = static_cast<uint32_t>(std::nearbyint(std::ldexp(magnitude, -step)));
  // A count of 2048 carries into the exponent by itself, and counts below 1024 are subnormal.
  const uint32_t bits = step == -24 ? count : (static_cast<uint32_t>(step + 24) << 10) + count;
  return {static_cast<uint16_t>(sign | bits)};
}

}  // namespace tessera
