// GPTQ and plain rounding: against the algorithm as its paper has it for one row (with an inverse that shrinks),
// against each other on drawn inputs, and where there is nothing to round by.
#include "tensor/ops/quantize/gptq.h"

#include <limits>

#include "tensor/cpu/vectorize.h"
#include "tensor/ops/matmul/matmul.h"
#include "tests/support/errors.h"
#include "tests/support/tensors.h"

namespace tessera {
namespace {

Tensor drawn(const Shape& shape, const char* name, uint64_t seed, double deviation = 1) {
  const Philox random = Philox::named(seed, name);
  std::vector<float> values(static_cast<size_t>(shape.numel()));
  for (size_t i = 0; i < values.size(); ++i) values[i] = static_cast<float>(deviation * random.normal(i));
  return Tensor::of<float>(values, shape, make_arena());
}

// Inputs whose channels are mixtures of a few sources, and some noise: what layers see.
Tensor correlated(int64_t rows, int64_t columns, uint64_t seed) {
  const int64_t sources = columns / 4 + 1;
  const Tensor mixed = matmul(drawn({rows, sources}, "sources", seed), drawn({sources, columns}, "mixing", seed));
  const Tensor noise = drawn({rows, columns}, "noise", seed, 0.3);
  for (int64_t i = 0; i < mixed.numel(); ++i) mixed.data<float>()[i] += noise.data<float>()[i];
  return mixed;
}

InputSquares squares_of(const Tensor& x) {
  InputSquares out(x.dim(1));
  out.add(x);
  return out;
}

std::vector<float> decoded(const Int4Matrix& m) {
  std::vector<float> out(static_cast<size_t>(m.rows * m.columns));
  m.decode(0, out);
  return out;
}

// As GPTQ is derived from optimal brain quantisation: after each column its row and column leave the inverse.
std::vector<int> by_shrinking_inverse(const Tensor& weight, const InputSquares& inputs, int64_t group, double damping) {
  const auto n = static_cast<size_t>(inputs.columns());
  std::vector<std::vector<double>> a(n, std::vector<double>(2 * n, 0.0));
  double mean = 0;
  for (size_t i = 0; i < n; ++i) mean += inputs.values()[i * n + i] / static_cast<double>(n);
  for (size_t i = 0; i < n; ++i) {
    for (size_t k = 0; k < n; ++k) a[i][k] = inputs.values()[i * n + k];
    a[i][i] += damping * mean;
    a[i][n + i] = 1;
  }
  for (size_t i = 0; i < n; ++i) {  // Gauss and Jordan
    const double pivot = a[i][i];
    for (double& x : a[i]) x /= pivot;
    for (size_t r = 0; r < n; ++r)
      if (const double factor = a[r][i]; r != i)
        for (size_t k = 0; k < 2 * n; ++k) a[r][k] -= factor * a[i][k];
  }
  const int64_t rows = weight.dim(0);
  std::vector<double> w;
  for (const float v : weight.to_vector<float>()) w.push_back(v);
  std::vector<double> scale(static_cast<size_t>(rows));
  std::vector<int> codes(w.size());
  const auto inverse = [&](size_t i, size_t k) -> double& { return a[i][n + k]; };
  for (size_t j = 0; j < n; ++j) {
    for (size_t r = 0; r < static_cast<size_t>(rows); ++r) {
      double* const row = w.data() + r * n;
      if (j % static_cast<size_t>(group) == 0) {
        double largest = 0;
        for (size_t k = j; k < std::min(n, j + static_cast<size_t>(group)); ++k)
          largest = std::max(largest, std::abs(row[k]));
        scale[r] = wide(half_of(static_cast<float>(2 * largest / 15)));
      }
      const double q = std::clamp(std::nearbyint(row[j] / scale[r]), -8.0, 7.0);
      codes[r * n + j] = static_cast<int>(q) + 8;
      const double loss = (row[j] - q * scale[r]) / inverse(j, j);
      for (size_t k = j + 1; k < n; ++k) row[k] -= loss * inverse(j, k);
    }
    for (size_t i = j + 1; i < n; ++i)
      for (size_t k = j + 1; k < n; ++k) inverse(i, k) -= inverse(i, j) * inverse(j, k) / inverse(j, j);
  }
  return codes;
}

TEST(Gptq, RoundsAsThePaperSays) {
  struct Case {
    int64_t rows, columns, group;
  };
  uint64_t seed = 0;
  for (const Case& c : {Case{5, 48, 16}, {3, 64, 64}, {4, 300, 20}, {2, 320, 160}, {7, 18, 4}}) {
    const Tensor w = drawn({c.rows, c.columns}, "weight", ++seed, 0.02);
    const InputSquares inputs = squares_of(correlated(2 * c.columns, c.columns, seed));
    const Int4Matrix found = gptq(w, inputs, c.group);
    const std::vector<int> expected = by_shrinking_inverse(w, inputs, c.group, 0.01);
    for (int64_t row = 0; row < c.rows; ++row)
      for (int64_t k = 0; k < c.columns; ++k)
        ASSERT_EQ(found.code(row, k), expected[static_cast<size_t>(row * c.columns + k)])
            << c.columns << " in " << c.group << ": " << row << ", " << k;
  }
}

TEST(Gptq, LosesLessOfTheOutputThanRounding) {
  double sum = 0;
  constexpr int kDraws = 20;
  for (uint64_t seed = 1; seed <= kDraws; ++seed) {
    const Philox random = Philox::named(seed, "sizes");
    const int64_t group = int64_t{8} << random.below(3, 0),
                  columns = group * static_cast<int64_t>(1 + random.below(6, 1)),
                  rows = static_cast<int64_t>(1 + random.below(40, 2));
    const Tensor w = drawn({rows, columns}, "weight", seed, 0.05), x = correlated(4 * columns, columns, seed);
    const InputSquares inputs = squares_of(x);
    const double rounded = output_error(w, round_to_nearest(w, group), inputs),
                 found = output_error(w, gptq(w, inputs, group), inputs);
    EXPECT_LT(found, rounded) << rows << " x " << columns << " in groups of " << group;
    sum += found / rounded / kDraws;
  }
  EXPECT_LT(sum, 0.5);
}

TEST(Gptq, TheErrorIsThatOfTheOutput) {
  const Tensor w = drawn({6, 32}, "weight", 3), x = correlated(50, 32, 3);
  const Int4Matrix m = round_to_nearest(w, 8);
  const std::vector<float> q = decoded(m), from = w.to_vector<float>(), in = x.to_vector<float>();
  double lost = 0, all = 0;
  for (int64_t t = 0; t < 50; ++t)
    for (int64_t r = 0; r < 6; ++r) {
      double difference = 0, whole = 0;
      for (int64_t k = 0; k < 32; ++k) {
        const auto at = static_cast<size_t>(r * 32 + k);
        const double input = in[static_cast<size_t>(t * 32 + k)];
        difference += (static_cast<double>(from[at]) - static_cast<double>(q[at])) * input;
        whole += static_cast<double>(from[at]) * input;
      }
      lost += difference * difference, all += whole * whole;
    }
  EXPECT_NEAR(output_error(w, m, squares_of(x)), lost / all, 1e-5 * lost / all);
}

TEST(Gptq, ScalesAndCodesOfPlainRounding) {
  // The largest, 30, has the scale 4: 7 is the last code above, -8 the last below; -0.8 is 0.
  const Tensor w = Tensor::of<float>(std::vector<float>{30, -30, 6.1F, -0.8F, 0, 0, 0, 0}, {1, 8}, make_arena());
  const Int4Matrix m = round_to_nearest(w, 4);
  EXPECT_EQ(decoded(m), (std::vector<float>{28, -32, 8, 0, 0, 0, 0, 0}));
  EXPECT_EQ(wide(m.scale(0, 0)), 4.0F);
  EXPECT_EQ(m.code(0, 0), 15);
  EXPECT_EQ(m.code(0, 1), 0);
  EXPECT_EQ(m.codes[0], 0x0f);  // the even column in the low half
  const Tensor many = drawn({9, 40}, "weight", 5);
  const Int4Matrix rounded = round_to_nearest(many, 16);  // the last group has 8
  ASSERT_EQ(rounded.groups(), 3);
  const std::vector<float> q = decoded(rounded), from = many.to_vector<float>();
  for (int64_t r = 0; r < 9; ++r)
    for (int64_t k = 0; k < 40; ++k) {
      const auto at = static_cast<size_t>(r * 40 + k);
      const float scale = wide(rounded.scale(r, k / 16)), off = std::abs(q[at] - from[at]);
      EXPECT_LE(off, from[at] > 7 * scale ? scale * 0.51F : scale * 0.5F);
    }
  std::vector<float> part(50);
  rounded.decode(31, part);
  EXPECT_TRUE(std::equal(part.begin(), part.end(), q.begin() + 31));
}

TEST(Gptq, PartsThreadsAndOrderOfCallsDoNotMatter) {
  const Tensor w = drawn({24, 160}, "weight", 8), x = correlated(400, 160, 8);
  const int threads = cpu::threads();
  InputSquares inputs(160);
  for (int64_t t = 0; t < 400; t += 100) inputs.add(x.narrow(0, t, 100).reshape({2, 50, 160}));
  cpu::set_threads(1);
  const Int4Matrix whole = gptq(w, inputs, 32);
  cpu::set_threads(3);
  const Int4Matrix again = gptq(w, inputs, 32);
  cpu::set_threads(threads);
  EXPECT_EQ(again.codes, whole.codes);
  Int4Matrix parts = gptq(w.narrow(0, 0, 8), inputs, 32);
  parts.append(gptq(w.narrow(0, 8, 16), inputs, 32));
  EXPECT_EQ(parts.rows, 24);
  EXPECT_EQ(parts.codes, whole.codes);
  EXPECT_EQ(0, std::memcmp(parts.scales.data(), whole.scales.data(), parts.scales.size() * sizeof(Half)));
}

TEST(Gptq, InputsThatSayNothingLeavePlainRounding) {
  const Tensor w = drawn({4, 32}, "weight", 9);
  EXPECT_EQ(gptq(w, InputSquares(32), 16).codes, round_to_nearest(w, 16).codes);
  // A channel that is always zero is rounded to the nearest, and says nothing to others.
  Tensor x = correlated(100, 32, 9);
  x.narrow(1, 31, 1).fill(0);
  const Int4Matrix found = gptq(w, squares_of(x), 32);
  for (int64_t r = 0; r < 4; ++r) {
    const double scale = wide(found.scale(r, 0)), value = w.to_vector<float>()[static_cast<size_t>(r * 32 + 31)];
    EXPECT_EQ(found.code(r, 31), std::clamp(std::nearbyint(value / scale) + 8, 0.0, 15.0));
  }
}

TEST(Gptq, WhatCannotBeRoundedIsRefused) {
  const auto expect_refused = [](const auto& f, const std::string& words) {
    const std::string found = error_of(f);
    EXPECT_NE(found.find(words), std::string::npos) << found;
  };
  const Tensor w = drawn({4, 32}, "weight", 10);
  expect_refused([&] { gptq(w, InputSquares(16), 16); }, "float32 (4, 32); expected 16 columns");
  expect_refused([&] { InputSquares(16).add(w); }, "expected (..., 16)");
  expect_refused([&] { round_to_nearest(w.narrow(1, 0, 31), 16); }, "expected even columns");
  Tensor bad = w.clone();
  bad.data<float>()[7] = std::numeric_limits<float>::quiet_NaN();
  expect_refused([&] { round_to_nearest(bad, 16); }, "a number is not finite");
  expect_refused([&] { gptq(w, squares_of(bad), 16); }, "not finite");
  bad.data<float>()[7] = 1e9F;
  expect_refused([&] { round_to_nearest(bad, 16); }, "too large for a float16");
}

TEST(Int4Matrix, PacksTwoGroupsWithTheirScalesAndZeros) {
  Int4Matrix m(1, 8, 4);
  for (int c = 0; c < 8; ++c) m.set_code(0, c, c + 3);
  m.scale(0, 0) = half_of(1.0F), m.scale(0, 1) = half_of(-2.0F);
  const std::vector<int> expected{0x43, 0x65, 0x87, 0xa9, 0x00, 0x3c, 0x00, 0xc0, 0x88};
  std::vector<int> found;
  for (const std::byte b : m.packed()) found.push_back(static_cast<int>(b));
  EXPECT_EQ(found, expected);
  EXPECT_THROW((void)Int4Matrix(1, 8, 3).packed(), Error);
  EXPECT_THROW((void)Int4Matrix(1, 8, 8).packed(), Error);
}

}  // namespace
}  // namespace tessera
