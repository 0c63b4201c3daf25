// Matrices in four bits: against a slow encoder in float64 that looks for the nearest value, over random sizes, pieces
// and cuts.
#include "tensor/ops/quantize/quantize.h"

#include <gtest/gtest.h>

#include "tests/support/draw.h"

namespace tessera {
namespace {

using test::Draw;

std::vector<float> normals(Draw& d, int64_t count) {
  std::vector<float> out(static_cast<size_t>(count));
  const Philox random = Philox::named(static_cast<uint64_t>(d.between(0, 1 << 30)), "weights");
  for (size_t i = 0; i < out.size(); ++i) out[i] = static_cast<float>(0.02 * random.normal(i));
  return out;
}

FloatSource from(const std::vector<float>& values) {
  return [&values](int64_t begin, std::span<float> to) { std::copy_n(values.begin() + begin, to.size(), to.begin()); };
}

std::vector<float> numbers_of(const Packing& p, const std::vector<std::byte>& bytes) {
  std::vector<float> out(static_cast<size_t>(p.elements()));
  dequantize(p, bytes, 0, out);
  return out;
}

double nearest_of(std::span<const float> values, double x) {
  return *std::ranges::min_element(values, {}, [&](float v) { return std::abs(v - x); });
}

// Rounds numbers to NF4 as the paper says, with a search in the place of every shortcut.
std::vector<double> nf4_slowly(const std::vector<float>& x) {
  std::vector<double> scales, out;
  for (size_t b = 0; b < x.size(); b += 64) {
    double most = 0;
    for (size_t i = b; i < std::min(b + 64, x.size()); ++i) most = std::max<double>(most, std::abs(x[i]));
    scales.push_back(most);
  }
  double mean = 0;
  for (const double s : scales) mean += s / static_cast<double>(scales.size());
  std::vector<double> again;
  for (size_t g = 0; g < scales.size(); g += 256) {
    double most = 0;
    for (size_t b = g; b < std::min(g + 256, scales.size()); ++b) most = std::max(most, std::abs(scales[b] - mean));
    for (size_t b = g; b < std::min(g + 256, scales.size()); ++b)
      again.push_back(mean + most * (most > 0 ? nearest_of(dynamic_values(), (scales[b] - mean) / most) : 0));
  }
  for (size_t i = 0; i < x.size(); ++i)
    out.push_back(scales[i / 64] > 0 ? nearest_of(nf4_values(), x[i] / scales[i / 64]) * again[i / 64] : 0);
  return out;
}

// One value in a thousand may lie so near to a middle that float takes the other neighbour.
void expect_near(const std::vector<float>& found, const std::vector<double>& expected) {
  size_t off = 0;
  for (size_t i = 0; i < found.size(); ++i)
    off += std::abs(found[i] - expected[i]) > 1e-5 * std::abs(expected[i]) + 1e-9 ? 1 : 0;
  EXPECT_LE(off, found.size() / 1000);
}

TEST(Quantize, Nf4IsWhatThePaperSays) {
  for (uint64_t trial = 0; trial < 6; ++trial) {
    Draw d("nf4", trial);
    const Packing p{.codec = Codec::nf4, .rows = d.between(1, 90), .columns = d.between(1, 400), .pieces = {}};
    Packing one = p;
    one.pieces = {p.rows};
    const std::vector<float> x = normals(d, p.elements());
    expect_near(numbers_of(one, quantize(one, from(x))), nf4_slowly(x));
    EXPECT_EQ(one.bytes(), (one.elements() + 63) / 64 * 33 + 4 * ((one.elements() + 16383) / 16384 + 1));
  }
}

TEST(Quantize, ValuesAreThoseOfTheDataType) {
  EXPECT_EQ(nf4_values()[0], -1);
  EXPECT_EQ(nf4_values()[7], 0);
  EXPECT_EQ(nf4_values()[15], 1);
  EXPECT_TRUE(std::ranges::is_sorted(nf4_values()));
  EXPECT_TRUE(std::ranges::is_sorted(dynamic_values()));
  EXPECT_EQ(std::ranges::count(dynamic_values(), 0.0F), 1);
  EXPECT_FLOAT_EQ(dynamic_values()[255], 1);
  EXPECT_FLOAT_EQ(dynamic_values()[254], 0.9929687F);  // the middle of the last of 64 steps from 0.1 to 1
  EXPECT_FLOAT_EQ(dynamic_values()[0], -0.9929687F);
}

TEST(Quantize, FusingChangesNothing) {
  for (const Codec codec : {Codec::nf4, Codec::gptq}) {
    Draw d("fused", 1);
    const std::vector<int64_t> pieces{128, 64, 192};
    const Packing fused{.codec = codec, .rows = 384, .columns = 128, .pieces = pieces};
    const std::vector<float> x = normals(d, fused.elements());
    std::vector<float> apart;
    for (int64_t first = 0; const int64_t rows : pieces) {
      const Packing one{.codec = codec, .rows = rows, .columns = 128, .pieces = {rows}};
      const std::vector<float> own(x.begin() + first * 128, x.begin() + (first + rows) * 128);
      std::ranges::copy(numbers_of(one, quantize(one, from(own))), std::back_inserter(apart));
      first += rows;
    }
    EXPECT_EQ(numbers_of(fused, quantize(fused, from(x))), apart);
  }
}

// Tiles along both dims hold the numbers of the whole, and their bytes are of it.
TEST(Quantize, TilesAreOfTheWhole) {
  const ArenaPtr arena = make_arena();
  for (const Codec codec : {Codec::nf4, Codec::gptq})
    for (const int dim : {0, 1}) {
      Draw d("tiles", static_cast<uint64_t>(dim));
      const Packing p{.codec = codec, .rows = 96, .columns = 768, .pieces = {32, 64}};
      const std::vector<float> x = normals(d, p.elements());
      const std::vector<std::byte> whole = quantize(p, from(x));
      const std::vector<float> expected = numbers_of(p, whole);
      std::vector<ElementRun> runs;
      if (dim == 0)
        runs = {{0, 16 * 768, 16 * 768}, {16 * 768, 64 * 768, 32 * 768}};
      else
        for (int64_t r = 0; r < 96; ++r) runs.push_back({r * 256, r * 768 + 512, 256});
      int64_t elements = 0;
      for (const ElementRun& run : runs) elements += run.count;
      EXPECT_EQ(splits_block(p, runs), 0);
      const Tensor bytes = Tensor::empty({p.bytes(elements)}, DType::uint8, arena);
      int64_t next = 0;
      for_each_byte_run(p, runs, [&](int64_t here, int64_t from_byte, int64_t count) {
        EXPECT_EQ(here, next);  // in order, without gaps
        next += count;
        std::copy_n(whole.begin() + from_byte, count, bytes.raw() + here);
      });
      EXPECT_EQ(next, bytes.numel());
      for (const DType dtype : {DType::float32, DType::bfloat16, DType::float64}) {
        Tensor out = Tensor::empty({elements}, dtype, arena);
        dequantize(p, runs, bytes, out);
        const std::vector<double> found = out.to(DType::float64).to_vector<double>();
        for (const ElementRun& run : runs)
          for (int64_t i = 0; i < run.count; ++i) {
            const float e = expected[static_cast<size_t>(run.whole + i)];
            ASSERT_EQ(found[static_cast<size_t>(run.here + i)],
                      dtype == DType::bfloat16 ? static_cast<float>(bfloat16(e)) : e);
          }
      }
    }
}

TEST(Quantize, CutsThroughBlocksAreSeen) {
  const Packing p{.codec = Codec::nf4, .rows = 3, .columns = 96, .pieces = {3}};
  const std::vector<ElementRun> rows{{0, 96, 192}}, last{{0, 192, 96}};
  EXPECT_EQ(splits_block(p, rows), 96);
  EXPECT_EQ(splits_block(p, last), 0);  // from a bound to the end, which may be inside of a block
}

// GPTQ's codes: each number is within half a step of its own, and zero is zero.
TEST(Quantize, GroupsOfGptqAreRoundedToTheNearest) {
  Draw d("gptq", 0);
  const Packing p{.codec = Codec::gptq, .rows = 4, .columns = 96, .pieces = {4}, .group = 32};
  std::vector<float> x = normals(d, p.elements());
  std::fill_n(x.begin(), 32, 0.0F);
  x[40] = 0;
  const std::vector<float> found = numbers_of(p, quantize(p, from(x)));
  EXPECT_EQ(p.bytes(), 6 * (32 + 5));
  for (size_t g = 0; g < x.size(); g += 32) {
    float most = 0;
    for (size_t i = g; i < g + 32; ++i) most = std::max(most, std::abs(x[i]));
    const float step = wide(half_of(2 * most / 15));
    for (size_t i = g; i < g + 32; ++i) EXPECT_LE(std::abs(found[i] - x[i]), 0.51F * step + 1e-3F * std::abs(x[i]));
  }
  EXPECT_EQ(found[0], 0);
  EXPECT_EQ(found[40], 0);
}

TEST(Quantize, MistakesAreNamed) {
  const Packing split{.codec = Codec::nf4, .rows = 3, .columns = 32, .pieces = {1, 2}},
      odd{.codec = Codec::gptq, .rows = 2, .columns = 200, .pieces = {2}};
  EXPECT_THROW(check(split, "a.weight"), Error);
  EXPECT_THROW(check(odd, "a.weight"), Error);
  const Packing p{.codec = Codec::nf4, .rows = 1, .columns = 64, .pieces = {1}};
  std::vector<float> x(64, 1.0F);
  x[3] = std::nanf("");
  EXPECT_THROW(quantize(p, from(x)), Error);
}

TEST(Half, EveryFloat16ComesBack) {
  for (uint32_t bits = 0; bits < 0x10000; ++bits) {
    const Half h{static_cast<uint16_t>(bits)};
    if ((bits & 0x7c00u) == 0x7c00u) continue;
    ASSERT_EQ(half_of(wide(h)).bits, bits);
  }
  EXPECT_EQ(half_of(65519.0F).bits, 0x7bff);
  EXPECT_EQ(half_of(65520.0F).bits, 0x7c00);
  EXPECT_EQ(half_of(1.0F + 0x1p-11F).bits, 0x3c00);  // a tie, to even
  EXPECT_EQ(half_of(1.0F + 0x1.8p-10F).bits, 0x3c02);
}

}  // namespace
}  // namespace tessera
