// Exact sums of squares: independent of order and distribution, and equal to the rounded exact sum.
#include "optim/exact_norm.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "tests/support/tensors.h"

namespace tessera {
namespace {

ExactSum squares(const Tensor& x) {
  ExactSum sum{};
  add_squares(sum, x);
  return sum;
}

// Magnitudes from 2^-60 to 2^20.
Tensor wide_values(DType dtype, int64_t n, int64_t first = 0) {
  const Philox random = Philox::named(3, "exact norm");
  std::vector<double> v;
  for (int64_t i = first; i < first + n; ++i)
    v.push_back(random.normal(static_cast<uint64_t>(i)) * std::ldexp(1.0, static_cast<int>(i * 37 % 81) - 60));
  return Tensor::of<double>(v, {n}, make_arena()).to(dtype);
}

TEST(ExactNorm, IsSquareRootOfCountForOnes) {
  for (const DType dtype : {DType::float64, DType::float32, DType::bfloat16})
    for (const int64_t n : {1, 255, 256, 257, 100003}) {
      const Tensor ones = Tensor::empty({n}, dtype, make_arena());
      Tensor(ones).fill(1);
      EXPECT_EQ(total(squares(ones)), static_cast<double>(n));
    }
}

TEST(ExactNorm, BinsAreIndependentOfOrderAndShards) {
  for (const DType dtype : {DType::float64, DType::float32}) {
    const int64_t n = 20000;
    const Tensor x = wide_values(dtype, n);
    const ExactSum all = squares(x);
    for (const int64_t cut : {1, 255, 7777}) {
      ExactSum sum{};
      add_squares(sum, x.narrow(0, cut, n - cut));
      const ExactSum rest = squares(x.narrow(0, 0, cut));
      for (size_t bin = 0; bin < sum.size(); ++bin) sum[bin] += rest[bin];
      EXPECT_EQ(sum, all);
    }
    std::vector<double> reversed = test::host_values(x);
    std::reverse(reversed.begin(), reversed.end());
    EXPECT_EQ(squares(Tensor::of<double>(reversed, {n}, make_arena()).to(dtype)), all);
    double plain = 0;
    for (const double v : reversed) plain += v * v;
    EXPECT_NEAR(total(all), plain, 1e-10 * plain);
  }
}

TEST(ExactNorm, KeepsTermsBelowHalfAnUlp) {
  // Each square of 2^-27 vanishes next to 1 in float64; 1,024 of them add up to 2^-44.
  std::vector<double> v(1025, std::ldexp(1.0, -27));
  v[0] = 1;
  const Tensor x = Tensor::of<double>(v, {1025}, make_arena());
  EXPECT_EQ(total(squares(x)), 1 + std::ldexp(1.0, -44));
}

TEST(ExactNorm, CoversLowPartsOfFloat64Squares) {
  const double x = 1 + std::ldexp(1.0, -40);  // x^2 = 1 + 2^-39 + 2^-80
  const std::vector<double> v(1 << 12, x);
  const Tensor t = Tensor::of<double>(v, {std::ssize(v)}, make_arena());
  EXPECT_EQ(total(squares(t)), std::ldexp(1.0, 12) * (1 + std::ldexp(1.0, -39)));
  ExactSum sum = squares(t);
  const ExactSum high = squares(Tensor::of<double>(std::vector<double>(1 << 12, 1.0), {1 << 12}, make_arena()));
  for (size_t bin = 0; bin < sum.size(); ++bin) sum[bin] -= high[bin];
  EXPECT_EQ(total(sum), std::ldexp(1.0, 12) * (std::ldexp(1.0, -39) + std::ldexp(1.0, -80)));
}

TEST(ExactNorm, PropagatesNonFiniteValuesAndHandlesExtremes) {
  const auto of = [](double value, DType dtype) {
    return total(squares(Tensor::of<double>(std::vector<double>{0.5, value, 0.25}, {3}, make_arena()).to(dtype)));
  };
  EXPECT_TRUE(std::isnan(of(std::numeric_limits<double>::quiet_NaN(), DType::float32)));
  EXPECT_FALSE(std::isfinite(of(std::numeric_limits<double>::infinity(), DType::float32)));
  EXPECT_FALSE(std::isfinite(of(1e200, DType::float64)));
  EXPECT_EQ(of(std::ldexp(1.0, 120), DType::float32), std::ldexp(1.0, 240));
  EXPECT_EQ(of(std::ldexp(1.0, -149), DType::float32), 0.3125);
  EXPECT_EQ(total(squares(Tensor::zeros({10}, DType::float32, make_arena()))), 0);
}

}  // namespace
}  // namespace tessera
