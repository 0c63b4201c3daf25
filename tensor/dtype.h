// Element types of tensors, and bfloat16 as a storage type: its arithmetic is done in float and rounded once, to
// nearest even, on store. uint8 holds opaque bytes.
#pragma once
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <string_view>
#include <type_traits>

namespace tessera {

enum class DType : uint8_t { float64, float32, bfloat16, int32, int64, uint8 };

constexpr int64_t element_size(DType t) {
  constexpr int64_t sizes[] = {8, 4, 2, 4, 8, 1};
  return sizes[static_cast<int>(t)];
}

constexpr std::string_view to_string(DType t) {
  constexpr std::string_view names[] = {"float64", "float32", "bfloat16", "int32", "int64", "uint8"};
  return names[static_cast<int>(t)];
}

constexpr bool is_floating(DType t) { return t == DType::float64 || t == DType::float32 || t == DType::bfloat16; }
// For accumulators, statistics and optimizer state.
constexpr DType accum_dtype(DType t) { return t == DType::float64 ? t : DType::float32; }

struct bfloat16 {
  uint16_t bits = 0;
  constexpr bfloat16() = default;
  constexpr bfloat16(float x) {                     // rounds to nearest even; a NaN stays a (quiet) NaN
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800  // one instruction instead of seven
    if (!std::is_constant_evaluated()) {
      asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(x));
      return;
    }
#endif
    const uint32_t u = std::bit_cast<uint32_t>(x);
    const uint32_t rounded = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
    const uint32_t nan = (u >> 16) | 0x40u;
    bits = static_cast<uint16_t>((u & 0x7fffffffu) > 0x7f800000u ? nan : rounded);
  }
  constexpr operator float() const { return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16); }
};

template <class T>
using Accumulate = std::conditional_t<std::is_same_v<T, bfloat16>, float, T>;

// Rounds to odd: an inexact result becomes the neighbouring float with an odd last bit, so that a subsequent rounding
// to bfloat16 is correct.
constexpr float to_odd(double x) {
  const auto nearest = static_cast<float>(x);
  const auto back = static_cast<double>(nearest);
  const uint32_t bits = std::bit_cast<uint32_t>(nearest);
  if (back == x || bits % 2 == 1) return nearest;
  return std::bit_cast<float>((x < 0 ? back > x : back < x) ? bits + 1 : bits - 1);
}

template <class To, class From>
constexpr To converted(From x) {
  if constexpr (std::is_same_v<To, From>)
    return x;
  else if constexpr (std::is_same_v<To, bfloat16> && std::is_same_v<From, double>)
    return bfloat16(to_odd(x));
  else if constexpr (std::is_same_v<To, bfloat16>)
    return bfloat16(static_cast<float>(x));
  else
    return static_cast<To>(static_cast<Accumulate<From>>(x));
}

template <class T>
inline constexpr DType kDTypeOf = std::is_same_v<T, double>     ? DType::float64
                                  : std::is_same_v<T, bfloat16> ? DType::bfloat16
                                  : std::is_same_v<T, int32_t>  ? DType::int32
                                  : std::is_same_v<T, int64_t>  ? DType::int64
                                  : std::is_same_v<T, uint8_t>  ? DType::uint8
                                                                : DType::float32;

// IEEE float16 as stored in files; not a tensor dtype.

struct Half {
  uint16_t bits = 0;
};

constexpr float wide(Half h) {
  const uint32_t sign = static_cast<uint32_t>(h.bits & 0x8000u) << 16, exponent = (h.bits >> 10) & 0x1fu,
                 fraction = h.bits & 0x3ffu;
  if (exponent == 0) return (sign != 0 ? -0x1p-24F : 0x1p-24F) * static_cast<float>(fraction);
  const uint32_t biased = exponent == 0x1fu ? 0xffu : exponent + 112;
  return std::bit_cast<float>(sign | biased << 23 | fraction << 13);
}

// Rounds to nearest even; overflows to infinity. x must not be a NaN.
inline Half to_half(float x) {
  const auto sign = static_cast<uint16_t>(std::bit_cast<uint32_t>(x) >> 16 & 0x8000u);
  const float magnitude = std::abs(x);
  if (magnitude >= 65520.0F) return {static_cast<uint16_t>(sign | 0x7c00u)};
  int exponent = 0;
  std::frexp(magnitude, &exponent);                                     // f 2^exponent with f in [0.5, 1)
  const int step = magnitude > 0 ? std::max(exponent - 11, -24) : -24;  // the last bit is worth 2^step
  const auto count = static_cast<uint32_t>(std::nearbyint(std::ldexp(magnitude, -step)));
  // A count of 2048 carries into the exponent; counts below 1024 are subnormal.
  const uint32_t bits = step == -24 ? count : (static_cast<uint32_t>(step + 24) << 10) + count;
  return {static_cast<uint16_t>(sign | bits)};
}

}  // namespace tessera
