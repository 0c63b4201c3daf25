// Scalar functions of the kernels: explicit fused multiply-adds, vectorizable, bitwise identical in every lane, loop
// tail, instruction set and on GPUs. constexpr, because nvcc then compiles them for the device.
#pragma once
#include <bit>
#include <cmath>
#include <cstdint>

namespace tessera::math {

constexpr float fma(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
constexpr double fma(double a, double b, double c) { return __builtin_fma(a, b, c); }

// e^x to about 1 ulp: x = n ln 2 + r with |r| <= ln(2)/2; degree-7 minimax polynomial in r from Moshier's Cephes
// library. Below -87.34 returns 0 (no denormals), above 88.72 infinity.
constexpr float exp(float x) {
  const float shifted = fma(x, 1.44269504f, 12582912.0f);  // adds 1.5 * 2^23: the low bits now hold round(x / ln 2)
  const float n = shifted - 12582912.0f;
  const float r = fma(n, -1.42860677e-6f, fma(n, -0.693145752f, x));
  float p = 1.9875691500e-4f;
  p = fma(p, r, 1.3981999507e-3f);
  p = fma(p, r, 8.3334519073e-3f);
  p = fma(p, r, 4.1665795894e-2f);
  p = fma(p, r, 1.6666665459e-1f);
  p = fma(p, r, 5.0000001201e-1f);
  p = fma(p, r * r, r) + 1.0f;
  // 2^n in two factors, since n may be 128.
  const auto k = static_cast<int32_t>(std::bit_cast<uint32_t>(shifted) - 0x4b400000U);
  const int32_t half = k >> 1;
  const float scaled = p * std::bit_cast<float>((half + 127) << 23) * std::bit_cast<float>((k - half + 127) << 23);
  const float low = x < -87.336544f ? 0.0f : scaled;
  return x > 88.722839f ? __builtin_huge_valf() : low;
}
constexpr double exp(double x) { return std::exp(x); }

constexpr float log(float x) { return std::log(x); }
constexpr double log(double x) { return std::log(x); }

constexpr float sqrt(float x) { return __builtin_sqrtf(x); }
constexpr double sqrt(double x) { return __builtin_sqrt(x); }

template <class T>
constexpr T sigmoid(T x) {
  return T(1) / (T(1) + exp(-x));
}

// tanh x = 1 - 2 / (e^(2x) + 1); for |x| < 0.625, where that cancels, a minimax polynomial from Cephes.
constexpr float tanh(float x) {
  const float x2 = x * x;
  float p = -5.70498872745e-3f;
  p = fma(p, x2, 2.06390887954e-2f);
  p = fma(p, x2, -5.37397155531e-2f);
  p = fma(p, x2, 1.33314422036e-1f);
  p = fma(p, x2, -3.33332819422e-1f);
  const float small = fma(p * x2, x, x);
  const float big = 1.0f - 2.0f / (exp(2.0f * x) + 1.0f);
  return x2 < 0.390625f ? small : big;
}
constexpr double tanh(double x) { return std::tanh(x); }

// Normal CDF at x, given e = exp(-x^2 / 2): the lower tail is e times a minimax polynomial in t = 1 / (1 + 0.27 |x|),
// fitted down to -13.3 (relative error 2.4e-8 before rounding).
constexpr float normal_below(float x, float e) {
  const float t = 1.0f / fma(0.27f, x < 0 ? -x : x, 1.0f);
  float p = 2.882688575e-2f;
  p = fma(p, t, -1.258092316e-1f);
  p = fma(p, t, 1.683312605e-1f);
  p = fma(p, t, -6.747197259e-2f);
  p = fma(p, t, 1.065653431e-1f);
  p = fma(p, t, 7.261546924e-2f);
  p = fma(p, t, 1.016572991e-1f);
  p = fma(p, t, 1.075657347e-1f);
  p = fma(p, t, 1.077192233e-1f);
  const float tail = p * t * e;
  return x < 0 ? tail : 1.0f - tail;
}
constexpr double normal_below(double x, double) { return 0.5 * std::erfc(x * -0.70710678118654752); }

}  // namespace tessera::math
