// The maximum difference between a formula's values on GPU and CPU that is due to their mathematical libraries. Library
// errors are propagated through the formula to first order, element by element: 1 - tanh^2 x, for example, retains the
// absolute error of the square even if it is small.
#pragma once
#include <gtest/gtest.h>

#include <cmath>
#include <string_view>
#include <vector>

#include "tensor/ops/elementwise_list.h"
#include "tests/support/tensors.h"

namespace tessera::test {

constexpr double machine_epsilon(DType dtype) {
  return dtype == DType::float64 ? 0x1p-52 : dtype == DType::float32 ? 0x1p-23 : 0x1p-7;
}

// Maximum errors in units of the last place. CUDA C++ Programming Guide, "Mathematical Functions", tables of standard
// functions: relative to the correctly rounded result, and therefore half a unit less than the error relative to the
// exact one; glibc manual, "Known Maximum Errors in Math Functions", x86_64: relative to the exact one. Other functions
// are defined in tensor/math.h and bitwise identical on both sides.
struct MaximumUlps {
  std::string_view function;
  DType dtype;
  double cuda, glibc;
  constexpr double apart() const { return cuda + 0.5 + glibc; }
};
inline constexpr MaximumUlps kErfc{"erfc", DType::float64, 5, 5}, kExp{"exp", DType::float64, 1, 1},
    kTanh{"tanh", DType::float64, 1, 2}, kLog{"log", DType::float64, 1, 1}, kLogFloat{"logf", DType::float32, 1, 1};

// A value, and its maximum difference between GPU and CPU. Equal operands are rounded identically.
struct Near {
  double value = 0, apart = 0, epsilon = 0;
  Near rounded() const { return {value, apart > 0 ? apart + epsilon * std::abs(value) : 0, epsilon}; }
  friend Near operator+(Near a, Near b) { return Near{a.value + b.value, a.apart + b.apart, a.epsilon}.rounded(); }
  friend Near operator-(double a, Near b) { return Near{a - b.value, b.apart, b.epsilon}.rounded(); }
  friend Near operator*(Near a, Near b) {
    return Near{a.value * b.value, std::abs(a.value) * b.apart + std::abs(b.value) * a.apart, a.epsilon}.rounded();
  }
};

// An op's value f(x) and derivative df(x), computed in `wide` (float64 or float32), with their maximum differences. Ops
// not listed here call no library.
struct NearOp {
  Near f, df;
};
template <class Op>
NearOp near_op(double x, DType wide) {
  const std::string_view name = Op::name;
  const double epsilon = machine_epsilon(wide);
  const auto known = [&](double v) { return Near{v, 0, epsilon}; };
  const auto from = [&](const MaximumUlps& library, double v) {
    return Near{v, library.dtype == wide ? library.apart() * epsilon * std::abs(v) : 0, epsilon};
  };
  const auto sigmoid = [&](double v) {
    const Near below = known(1) + from(kExp, std::exp(-v));
    return Near{1 / below.value, below.apart / (below.value * below.value), epsilon}.rounded();
  };
  if (name == kExp.function) return {from(kExp, std::exp(x)), from(kExp, std::exp(x))};
  if (name == kLog.function) return {from(wide == DType::float64 ? kLog : kLogFloat, std::log(x)), known(1 / x)};
  if (name == kTanh.function) {
    const Near t = from(kTanh, std::tanh(x));
    return {t, 1 - t * t};
  }
  const bool gelu = name == Gelu::name;
  if (name == Sigmoid::name || name == Silu::name || gelu) {
    const Near s = sigmoid(gelu ? Gelu::twice_u(x) : x), weighted = name == Sigmoid::name ? s : known(x) * s;
    const Near turning = weighted * (1 - s);
    if (name == Sigmoid::name) return {s, turning};
    return {weighted, (gelu ? turning * known(3 * 0.0713548162726009 * x * x + 1.5957691216057308) : turning) + s};
  }
  if (name == GeluErf::name) {
    const Near below = known(0.5) * from(kErfc, std::erfc(x * -0.70710678118654752));
    return {known(x) * below, known(0.3989422804014327 * x) * from(kExp, std::exp(-0.5 * x * x)) + below};
  }
  return {known(Op::f(x)), known(Op::df(x))};
}

// Expects element i of `found` to differ from that of `expected` by at most near(i), plus one rounding to a narrower
// dtype.
template <class F>
void expect_near(const Tensor& found, const Tensor& expected, DType wide, const F& near) {
  const std::vector<double> a = host_values(found), b = host_values(expected);
  ASSERT_EQ(a.size(), b.size());
  for (size_t i = 0; i < a.size(); ++i) {
    Near allowed = near(i);
    if (expected.dtype() != wide) {
      allowed.epsilon = machine_epsilon(expected.dtype());
      allowed = allowed.rounded();
    }
    ASSERT_LE(std::abs(a[i] - b[i]), allowed.apart) << "element " << i << ": " << a[i] << " and " << b[i];
  }
}

// The same for gradients of unary ops: `found` comes from a GPU, `expected` from the CPU.
template <class Op>
void expect_near_gradient(const Tensor& found, const Tensor& expected, const Tensor& dy, const Tensor& x) {
  const DType wide = x.dtype() == DType::float64 ? DType::float64 : DType::float32;
  const std::vector<double> at = host_values(x), by = host_values(dy);
  expect_near(found, expected, wide, [&](size_t i) {
    const Near slope = near_op<Op>(at[i], wide).df;
    return slope * Near{by[i], 0, slope.epsilon};
  });
}

}  // namespace tessera::test
