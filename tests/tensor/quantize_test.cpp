// 4-bit matrices against a slow float64 encoder that searches for the nearest value; GPTQ against the paper's algorithm
// for one row; on a GPU bitwise identical to the CPU.

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <iterator>
#include <limits>
#include <numeric>
#include <span>
#include <string>
#include <vector>

#include "tensor/cpu/vectorize.h"
#include "tensor/ops/elementwise.h"
#include "tensor/ops/matmul/matmul.h"
#include "tensor/ops/quantize/gptq.h"
#include "tests/support/draw.h"
#include "tests/support/errors.h"
#include "tests/support/gpu.h"
#include "tests/support/tensors.h"

namespace tessera {
namespace {

using test::Sampler;

std::vector<float> normals(Sampler& d, int64_t count) {
  const Philox random = Philox::named(static_cast<uint64_t>(d.between(0, 1 << 30)), "weights");
  const auto small = [&](size_t i) { return 0.02 * random.normal(i); };
  return test::made({count}, DType::float32, make_arena(), small).to_vector<float>();
}

int64_t count_elements(const std::vector<ElementRun>& runs) {
  return std::accumulate(runs.begin(), runs.end(), int64_t{0},
                         [](int64_t sum, const ElementRun& run) { return sum + run.count; });
}

// The bytes of these element runs, copied from the matrix's bytes `full`.
Tensor as_bytes(const Packing& p, const std::vector<ElementRun>& runs, const std::vector<std::byte>& full) {
  const Tensor bytes = Tensor::empty({p.bytes(count_elements(runs))}, DType::uint8, make_arena());
  int64_t next = 0;
  for_each_byte_run(p, runs, [&](int64_t here, int64_t from, int64_t count) {
    EXPECT_EQ(here, next);  // in order, without gaps
    next += count;
    std::copy_n(full.begin() + from, count, bytes.raw() + here);
  });
  EXPECT_EQ(next, bytes.numel());
  return bytes;
}

FloatSource from(const std::vector<float>& values) {
  return [&values](int64_t begin, std::span<float> to) { std::copy_n(values.begin() + begin, to.size(), to.begin()); };
}

std::vector<float> unpack_numbers(const Packing& p, const std::vector<std::byte>& bytes) {
  std::vector<float> out(static_cast<size_t>(p.elements()));
  const size_t part = std::min<size_t>(out.size(), 67);  // odd: the second part starts inside a byte
  dequantize(p, bytes, 0, std::span(out).first(part));
  dequantize(p, bytes, static_cast<int64_t>(part), std::span(out).subspan(part));
  return out;
}

double nearest_value(std::span<const float> values, double x) {
  return *std::ranges::min_element(values, {}, [&](float v) { return std::abs(v - x); });
}

// Quantizes to NF4 as in the paper, with an exhaustive search instead of shortcuts.
std::vector<double> nf4_reference(const std::vector<float>& x) {
  std::vector<double> scales, out;
  for (size_t b = 0; b < x.size(); b += 64) {
    double max_abs = 0;
    for (size_t i = b; i < std::min(b + 64, x.size()); ++i) max_abs = std::max<double>(max_abs, std::abs(x[i]));
    scales.push_back(max_abs);
  }
  const double mean = std::accumulate(scales.begin(), scales.end(), 0.0) / static_cast<double>(scales.size());
  std::vector<double> again;
  for (size_t b = 0, g = 0; b < scales.size(); g = ++b / 256 * 256) {
    double max_abs = 0;
    for (size_t i = g; i < std::min(g + 256, scales.size()); ++i)
      max_abs = std::max(max_abs, std::abs(scales[i] - mean));
    again.push_back(mean + max_abs * (max_abs > 0 ? nearest_value(dynamic_values(), (scales[b] - mean) / max_abs) : 0));
  }
  for (size_t i = 0; i < x.size(); ++i)
    out.push_back(scales[i / 64] > 0 ? nearest_value(nf4_values(), x[i] / scales[i / 64]) * again[i / 64] : 0);
  return out;
}

// One value in a thousand may be so close to the midpoint of two codes that float rounding selects the other one.
void expect_near(const std::vector<float>& found, const std::vector<double>& expected) {
  size_t off = 0;
  for (size_t i = 0; i < found.size(); ++i)
    off += std::abs(found[i] - expected[i]) > 1e-5 * std::abs(expected[i]) + 1e-9 ? 1 : 0;
  EXPECT_LE(off, found.size() / 1000);
}

TEST(Quantize, Nf4MatchesReferenceEncoder) {
  for (uint64_t trial = 0; trial < 7; ++trial) {  // the last one exceeds the encoder's buffer
    Sampler d("nf4", trial);
    const int64_t rows = trial < 6 ? d.between(1, 90) : 700;
    const Packing p{
        .codec = Codec::nf4, .rows = rows, .columns = trial < 6 ? d.between(1, 400) : 401, .fused_rows = {rows}};
    const std::vector<float> x = normals(d, p.elements());
    expect_near(unpack_numbers(p, quantize(p, from(x))), nf4_reference(x));
    EXPECT_EQ(p.bytes(), (p.elements() + 63) / 64 * 33 + 4 * ((p.elements() + 16383) / 16384 + 1));
  }
}

// NF4 values are quantiles of the normal distribution, equally spaced in probability on each side of 0 and scaled so
// that the outermost, at 0.9677083, is 1. The 8-bit values are the bin centres of bitsandbytes' dynamic map.
TEST(Quantize, CodebooksMatchTheirDefinitions) {
  constexpr double kOutermost = 0.9677083, kScale = 1.8481307;  // kScale: normal quantile of kOutermost
  for (int i = 0; i < 16; ++i) {
    const double side = (i - 7) / (i < 7 ? 7.0 : 8.0);
    const double probability = 0.5 * std::erfc(-kScale * nf4_values()[static_cast<size_t>(i)] * M_SQRT1_2);
    EXPECT_NEAR(probability, 0.5 + (kOutermost - 0.5) * side, 1e-6) << i;
  }
  std::vector<double> expected{0, 1};
  for (int decade = 0; decade < 7; ++decade) {
    const double width = 0.9 / (1 << decade);
    for (double left = 0.1; left < 1 - width / 2; left += width)
      for (const double sign : {-1, 1}) expected.push_back(sign * (left + width / 2) * std::pow(10, decade - 6));
  }
  std::ranges::sort(expected);
  ASSERT_EQ(expected.size(), 256U);
  for (size_t i = 0; i < 256; ++i) EXPECT_FLOAT_EQ(dynamic_values()[i], static_cast<float>(expected[i])) << i;
}

TEST(Quantize, CodebooksAreSortedAndNormalized) {
  EXPECT_EQ(nf4_values()[0], -1);
  EXPECT_EQ(nf4_values()[7], 0);
  EXPECT_EQ(nf4_values()[15], 1);
  EXPECT_TRUE(std::ranges::is_sorted(nf4_values()));
  EXPECT_TRUE(std::ranges::is_sorted(dynamic_values()));
  EXPECT_EQ(std::ranges::count(dynamic_values(), 0.0F), 1);
  EXPECT_FLOAT_EQ(dynamic_values()[255], 1);
  EXPECT_FLOAT_EQ(dynamic_values()[254], 0.9929687F);  // the midpoint of the last of 64 steps from 0.1 to 1
  EXPECT_FLOAT_EQ(dynamic_values()[0], -0.9929687F);
}

TEST(Quantize, CodesAreIndependentOfFusion) {
  for (const Codec codec : {Codec::nf4, Codec::gptq}) {
    Sampler d("fused", 1);
    const std::vector<int64_t> split_rows{128, 64, 192};
    const Packing fused{.codec = codec, .rows = 384, .columns = 128, .fused_rows = split_rows};
    const std::vector<float> x = normals(d, fused.elements());
    std::vector<float> apart;
    for (int64_t first = 0; const int64_t rows : split_rows) {
      const Packing one{.codec = codec, .rows = rows, .columns = 128, .fused_rows = {rows}};
      const std::vector<float> own(x.begin() + first * 128, x.begin() + (first + rows) * 128);
      std::ranges::copy(unpack_numbers(one, quantize(one, from(own))), std::back_inserter(apart));
      first += rows;
    }
    EXPECT_EQ(unpack_numbers(fused, quantize(fused, from(x))), apart);
  }
}

// Tiles along both dims contain the values and bytes of the full matrix.
TEST(Quantize, TilesMatchFullMatrix) {
  for (const Codec codec : {Codec::nf4, Codec::gptq})
    for (const int dim : {0, 1}) {
      Sampler d("tiles", static_cast<uint64_t>(dim));
      const Packing p{.codec = codec, .rows = 96, .columns = 768, .fused_rows = {32, 64}};
      const std::vector<float> x = normals(d, p.elements());
      const std::vector<std::byte> full = quantize(p, from(x));
      const std::vector<float> expected = unpack_numbers(p, full);
      std::vector<ElementRun> runs;
      if (dim == 0)
        runs = {{0, 16 * 768, 16 * 768}, {16 * 768, 64 * 768, 32 * 768}};
      else
        for (int64_t r = 0; r < 96; ++r) runs.push_back({r * 256, r * 768 + 512, 256});
      EXPECT_EQ(splits_block(p, runs), 0);
      const Tensor bytes = as_bytes(p, runs, full);
      for (const DType dtype : {DType::float32, DType::bfloat16, DType::float64}) {
        Tensor out = Tensor::empty({count_elements(runs)}, dtype, bytes.arena());
        dequantize(p, runs, bytes, out);
        const std::vector<double> found = test::host_values(out);
        for (const ElementRun& run : runs)
          for (int64_t i = 0; i < run.count; ++i) {
            const float e = expected[static_cast<size_t>(run.full + i)];
            ASSERT_EQ(found[static_cast<size_t>(run.here + i)],
                      dtype == DType::bfloat16 ? static_cast<float>(bfloat16(e)) : e);
          }
      }
    }
}

TEST(Quantize, DetectsSplitBlocks) {
  const Packing p{.codec = Codec::nf4, .rows = 3, .columns = 96, .fused_rows = {3}};
  const std::vector<ElementRun> rows{{0, 96, 192}}, last{{0, 192, 96}};
  EXPECT_EQ(splits_block(p, rows), 96);
  EXPECT_EQ(splits_block(p, last), 0);  // from a block boundary to the end, which may be inside a block
}

// GPTQ codes: each value is within half a step of its original, and zero is exact.
TEST(Quantize, GptqGroupsRoundToNearest) {
  Sampler d("gptq", 0);
  const Packing p{.codec = Codec::gptq, .rows = 4, .columns = 96, .fused_rows = {4}, .group = 32};
  std::vector<float> x = normals(d, p.elements());
  std::fill_n(x.begin(), 32, 0.0F);
  x[40] = 0;
  const std::vector<float> found = unpack_numbers(p, quantize(p, from(x)));
  EXPECT_EQ(p.bytes(), 6 * (32 + 5));
  for (size_t g = 0; g < x.size(); g += 32) {
    float max_abs = 0;
    for (size_t i = g; i < g + 32; ++i) max_abs = std::max(max_abs, std::abs(x[i]));
    const float step = wide(to_half(2 * max_abs / 15));
    for (size_t i = g; i < g + 32; ++i) EXPECT_LE(std::abs(found[i] - x[i]), 0.51F * step + 1e-3F * std::abs(x[i]));
  }
  EXPECT_EQ(found[0], 0);
  EXPECT_EQ(found[40], 0);
}

TEST(Quantize, RejectsInvalidInputs) {
  const Packing split{.codec = Codec::nf4, .rows = 3, .columns = 32, .fused_rows = {1, 2}},
      odd{.codec = Codec::gptq, .rows = 2, .columns = 200, .fused_rows = {2}};
  EXPECT_THROW(check(split, "a.weight"), Error);
  EXPECT_THROW(check(odd, "a.weight"), Error);
  const Packing p{.codec = Codec::nf4, .rows = 1, .columns = 64, .fused_rows = {1}};
  std::vector<float> x(64, 1.0F);
  x[3] = std::nanf("");
  EXPECT_THROW(quantize(p, from(x)), Error);
}

TEST(Half, EveryFloat16RoundTrips) {
  for (uint32_t bits = 0; bits < 0x10000; ++bits) {
    const Half h{static_cast<uint16_t>(bits)};
    if ((bits & 0x7c00u) == 0x7c00u) continue;
    ASSERT_EQ(to_half(wide(h)).bits, bits);
  }
  EXPECT_EQ(to_half(65519.0F).bits, 0x7bff);
  EXPECT_EQ(to_half(65520.0F).bits, 0x7c00);
  EXPECT_EQ(to_half(1.0F + 0x1p-11F).bits, 0x3c00);  // a tie, to even
  EXPECT_EQ(to_half(1.0F + 0x1.8p-10F).bits, 0x3c02);
}

// GPTQ and plain rounding, compared with the paper's algorithm for one row (with a shrinking inverse) and, on random
// inputs, with each other; also degenerate inputs.

Tensor random_tensor(const Shape& shape, const char* name, uint64_t seed, double deviation = 1) {
  const Philox random = Philox::named(seed, name);
  return test::made(shape, DType::float32, make_arena(), [&](size_t i) { return deviation * random.normal(i); });
}

// Inputs whose channels are mixtures of a few sources plus noise, as in real layers.
Tensor correlated(int64_t rows, int64_t columns, uint64_t seed) {
  const int64_t sources = columns / 4 + 1;
  Tensor mixed =
      matmul(random_tensor({rows, sources}, "sources", seed), random_tensor({sources, columns}, "mixing", seed));
  add_(mixed, random_tensor({rows, columns}, "noise", seed, 0.3));
  return mixed;
}

InputSquares input_squares(const Tensor& x) {
  InputSquares out(x.dim(1));
  out.add(x);
  return out;
}

std::vector<float> decoded(const Int4Matrix& m) {
  std::vector<float> out(static_cast<size_t>(m.rows * m.columns));
  m.decode(0, out);
  return out;
}

// GPTQ as derived from optimal brain quantization: after each column, its row and column are removed from the inverse.
std::vector<int> gptq_reference(const Tensor& weight, const InputSquares& inputs, int64_t group, double damping) {
  const auto n = static_cast<size_t>(inputs.columns()), rows = static_cast<size_t>(weight.dim(0));
  std::vector<std::vector<double>> a(n, std::vector<double>(2 * n, 0.0));
  double mean = 0;
  for (size_t i = 0; i < n; ++i) mean += inputs.values()[i * n + i] / static_cast<double>(n);
  for (size_t i = 0; i < n; ++i) {
    for (size_t k = 0; k < n; ++k) a[i][k] = inputs.values()[i * n + k];
    a[i][i] += damping * mean;
    a[i][n + i] = 1;
  }
  for (size_t i = 0; i < n; ++i) {  // Gauss-Jordan
    const double pivot = a[i][i];
    for (double& x : a[i]) x /= pivot;
    for (size_t r = 0; r < n; ++r)
      if (const double factor = a[r][i]; r != i)
        for (size_t k = 0; k < 2 * n; ++k) a[r][k] -= factor * a[i][k];
  }
  std::vector<double> w = test::host_values(weight), scale(rows);
  std::vector<int> codes(w.size());
  const auto inverse = [&](size_t i, size_t k) -> double& { return a[i][n + k]; };
  for (size_t j = 0; j < n; ++j) {
    for (size_t r = 0; r < rows; ++r) {
      double* const row = w.data() + r * n;
      if (j % static_cast<size_t>(group) == 0) {
        double largest = 0;
        for (size_t k = j; k < std::min(n, j + static_cast<size_t>(group)); ++k)
          largest = std::max(largest, std::abs(row[k]));
        scale[r] = wide(to_half(static_cast<float>(2 * largest / 15)));
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

TEST(Gptq, MatchesReferenceAlgorithm) {
  uint64_t seed = 0;
  for (const auto& [rows, columns, group] :
       {std::array<int64_t, 3>{5, 48, 16}, {3, 64, 64}, {4, 300, 20}, {2, 320, 160}, {7, 18, 4}}) {
    const Tensor w = random_tensor({rows, columns}, "weight", ++seed, 0.02);
    const InputSquares inputs = input_squares(correlated(2 * columns, columns, seed));
    const Int4Matrix found = gptq(w, inputs, group);
    const std::vector<int> expected = gptq_reference(w, inputs, group, 0.01);
    for (int64_t row = 0; row < rows; ++row)
      for (int64_t k = 0; k < columns; ++k)
        ASSERT_EQ(found.code(row, k), expected[static_cast<size_t>(row * columns + k)])
            << columns << " in " << group << ": " << row << ", " << k;
  }
}

TEST(Gptq, OutputErrorIsBelowRoundToNearest) {
  double sum = 0;
  constexpr int kSamples = 20;
  for (uint64_t seed = 1; seed <= kSamples; ++seed) {
    const Philox random = Philox::named(seed, "sizes");
    const int64_t group = int64_t{8} << random.below(3, 0),
                  columns = group * static_cast<int64_t>(1 + random.below(6, 1)),
                  rows = static_cast<int64_t>(1 + random.below(40, 2));
    const Tensor w = random_tensor({rows, columns}, "weight", seed, 0.05), x = correlated(4 * columns, columns, seed);
    const InputSquares inputs = input_squares(x);
    const double rounded = output_error(w, round_to_nearest(w, group), inputs),
                 found = output_error(w, gptq(w, inputs, group), inputs);
    EXPECT_LT(found, rounded) << rows << " x " << columns << " in groups of " << group;
    sum += found / rounded / kSamples;
  }
  EXPECT_LT(sum, 0.5);
}

TEST(Gptq, OutputErrorMatchesErrorOfLayerOutput) {
  const Tensor w = random_tensor({6, 32}, "weight", 3), x = correlated(50, 32, 3);
  const Int4Matrix m = round_to_nearest(w, 8);
  const auto out = [&](const Tensor& weight) {  // in float64
    return linear(x.to(DType::float64), weight.to(DType::float64), Tensor());
  };
  const double off = test::distance(out(Tensor::of<float>(decoded(m), {6, 32}, make_arena())), out(w));
  EXPECT_NEAR(output_error(w, m, input_squares(x)), off * off, 1e-5 * off * off);
}

TEST(Gptq, RoundToNearestComputesScalesAndCodes) {
  // The maximum, 30, gives a scale of 4, since codes range from -8 to 7; -0.8 becomes 0.
  const Tensor w = Tensor::of<float>(std::vector<float>{30, -30, 6.1F, -0.8F, 0, 0, 0, 0}, {1, 8}, make_arena());
  const Int4Matrix m = round_to_nearest(w, 4);
  EXPECT_EQ(decoded(m), (std::vector<float>{28, -32, 8, 0, 0, 0, 0, 0}));
  EXPECT_EQ(wide(m.scale(0, 0)), 4.0F);
  EXPECT_EQ(m.code(0, 0), 15);
  EXPECT_EQ(m.code(0, 1), 0);
  EXPECT_EQ(m.codes[0], 0x0f);  // the even column in the low half
  const Tensor many = random_tensor({9, 40}, "weight", 5);
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

TEST(Gptq, ResultIsIndependentOfFusionThreadsAndCallOrder) {
  const Tensor w = random_tensor({24, 160}, "weight", 8), x = correlated(400, 160, 8);
  const int threads = cpu::threads();
  InputSquares inputs(160);
  for (int64_t t = 0; t < 400; t += 100) inputs.add(x.narrow(0, t, 100).reshape({2, 50, 160}));
  cpu::set_threads(1);
  const Int4Matrix full = gptq(w, inputs, 32);
  cpu::set_threads(3);
  const Int4Matrix again = gptq(w, inputs, 32);
  cpu::set_threads(threads);
  EXPECT_EQ(again.codes, full.codes);
  Int4Matrix parts = gptq(w.narrow(0, 0, 8), inputs, 32);
  parts.append(gptq(w.narrow(0, 8, 16), inputs, 32));
  EXPECT_EQ(parts.rows, 24);
  EXPECT_EQ(parts.codes, full.codes);
  EXPECT_EQ(0, std::memcmp(parts.scales.data(), full.scales.data(), parts.scales.size() * sizeof(Half)));
}

TEST(Gptq, ZeroInputsFallBackToRoundToNearest) {
  const Tensor w = random_tensor({4, 32}, "weight", 9);
  EXPECT_EQ(gptq(w, InputSquares(32), 16).codes, round_to_nearest(w, 16).codes);
  // A channel that is always zero is rounded to nearest and does not affect others.
  Tensor x = correlated(100, 32, 9);
  x.narrow(1, 31, 1).fill(0);
  const Int4Matrix found = gptq(w, input_squares(x), 32);
  for (int64_t r = 0; r < 4; ++r) {
    const double scale = wide(found.scale(r, 0)), value = w.to_vector<float>()[static_cast<size_t>(r * 32 + 31)];
    EXPECT_EQ(found.code(r, 31), std::clamp(std::nearbyint(value / scale) + 8, 0.0, 15.0));
  }
}

TEST(Gptq, RejectsInvalidInputs) {
  const auto expect_refused = [](const auto& f, const char* message) { EXPECT_TRUE(has(error_message(f), message)); };
  const Tensor w = random_tensor({4, 32}, "weight", 10);
  expect_refused([&] { gptq(w, InputSquares(16), 16); }, "float32 (4, 32); expected 16 columns");
  expect_refused([&] { InputSquares(16).add(w); }, "expected (..., 16)");
  expect_refused([&] { round_to_nearest(w.narrow(1, 0, 31), 16); }, "expected an even number of columns");
  Tensor bad = w.clone();
  bad.data<float>()[7] = std::numeric_limits<float>::quiet_NaN();
  expect_refused([&] { round_to_nearest(bad, 16); }, "an element is not finite");
  expect_refused([&] { gptq(w, input_squares(bad), 16); }, "not finite");
  bad.data<float>()[7] = 1e9F;
  expect_refused([&] { round_to_nearest(bad, 16); }, "exceeds the range of float16");
}

TEST(Int4Matrix, PacksTwoGroupsWithTheirScalesAndZeros) {
  Int4Matrix m(1, 8, 4);
  for (int c = 0; c < 8; ++c) m.set_code(0, c, c + 3);
  m.scale(0, 0) = to_half(1.0F), m.scale(0, 1) = to_half(-2.0F);
  std::vector<int> found;
  for (const std::byte b : m.packed()) found.push_back(static_cast<int>(b));
  EXPECT_EQ(found, (std::vector<int>{0x43, 0x65, 0x87, 0xa9, 0x00, 0x3c, 0x00, 0xc0, 0x88}));
  EXPECT_THROW((void)Int4Matrix(1, 8, 3).packed(), Error);
  EXPECT_THROW((void)Int4Matrix(1, 8, 8).packed(), Error);
}

// Dequantization on a GPU, bitwise identical to the CPU, for full matrices and tiles of random sizes.

using QuantizeGpu = test::OnGpu;

// A tile of rows of every fused matrix (dim 0) or of columns (dim 1), split at block bounds.
std::vector<ElementRun> make_tile(const Packing& p, int dim, int64_t parts, int64_t part) {
  std::vector<ElementRun> runs;
  int64_t here = 0, first_row = 0;
  const auto push = [&](int64_t full, int64_t count) { runs.push_back({here, full, count}), here += count; };
  if (dim == 1) {
    const int64_t width = p.columns / parts;
    for (int64_t r = 0; r < p.rows; ++r) push(r * p.columns + part * width, width);
    return runs;
  }
  for (const int64_t rows : p.fused_rows) {
    push((first_row + rows / parts * part) * p.columns, rows / parts * p.columns);
    first_row += rows;
  }
  return runs;
}

TEST_F(QuantizeGpu, DequantizedValuesMatchCpuBitwise) {
  for (uint64_t trial = 0; trial < 40; ++trial) {
    Sampler d("quantized on a gpu", trial);
    Packing p{.codec = d.of({Codec::nf4, Codec::gptq})};
    const bool is_cut = d.between(0, 3) > 0;
    const int64_t fused = d.between(1, 4), parts = is_cut ? d.between(2, 3) : 1;
    p.group = d.of({2, 6, 32, 128});
    const int64_t unit = p.codec == Codec::nf4 ? 64 : 2 * p.group;
    p.columns = is_cut || fused > 1 || p.codec == Codec::gptq ? unit * parts * d.between(1, 5) : d.between(1, 700);
    for (int64_t i = 0; i < fused; ++i) p.fused_rows.push_back(parts * d.between(1, 40));
    for (const int64_t rows : p.fused_rows) p.rows += rows;
    const Tensor weights = random_tensor({p.elements()}, "weights", trial);
    const std::vector<std::byte> full = quantize(p, from(weights.to_vector<float>()));
    const std::vector<ElementRun> runs = is_cut ? make_tile(p, static_cast<int>(d.between(0, 1)), parts, parts - 1)
                                                : std::vector<ElementRun>{{0, 0, p.elements()}};
    SCOPED_TRACE(std::to_string(p.rows) + " x " + std::to_string(p.columns) + ", " + std::to_string(runs.size()) +
                 " runs");
    ASSERT_EQ(splits_block(p, runs), 0);
    const Tensor bytes = as_bytes(p, runs, full);
    for (const DType dtype : test::floating(arena)) {
      Tensor expected = Tensor::empty({count_elements(runs)}, dtype, bytes.arena()), found = expected.to(arena);
      dequantize(p, runs, bytes, expected);
      dequantize(p, runs, bytes.to(arena), found);
      EXPECT_TRUE(test::bitwise_equal(found, expected)) << to_string(dtype);
    }
  }
}

TEST_F(QuantizeGpu, RejectsTooManyFusedMatrices) {
  const Packing p{.codec = Codec::nf4, .rows = 5, .columns = 64, .fused_rows = {1, 1, 1, 1, 1}};
  const std::vector<ElementRun> runs{{0, 0, p.elements()}};
  const Tensor bytes = Tensor::zeros({p.bytes()}, DType::uint8, arena);
  Tensor out = Tensor::empty({p.elements()}, DType::float32, arena);
  EXPECT_THROW(dequantize(p, runs, bytes, out), Error);
}

}  // namespace
}  // namespace tessera
