// Scalars: the RNG against published vectors, rounding of all bfloat16 values and of copies, accuracy of exp and tanh,
// and bitwise identical results on every instruction set (also of Tessera's GEMM).

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "tensor/cpu/loops.h"
#include "tensor/ops/elementwise_list.h"
#include "tensor/ops/matmul/cpu/gemm.h"
#include "tensor/random.h"
#include "tests/support/gpu.h"
#include "tests/support/nearest.h"
#include "tests/support/tensors.h"

namespace tessera {
namespace {

using test::nearest_bf16;

// Random123's published known answers for philox4x32-10: counter, key, result.
TEST(Philox, MatchesPublishedTestVectors) {
  const auto at = [](uint64_t key, uint64_t low, uint64_t high) { return Philox(key)(low, high); };
  EXPECT_EQ(at(0, 0, 0), (Philox::Block{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}));
  EXPECT_EQ(at(~uint64_t{0}, ~uint64_t{0}, ~uint64_t{0}),
            (Philox::Block{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}));
  EXPECT_EQ(at(0x299f31d0a4093822, 0x85a308d3243f6a88, 0x0370734413198a2e),
            (Philox::Block{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}));
}

TEST(Philox, NamesSeedsAndStepsSelectDistinctStreams) {
  const uint32_t word = Philox::named(1, "a").word(5, 0);
  EXPECT_NE(word, Philox::named(1, "b").word(5, 0));
  EXPECT_NE(word, Philox::named(2, "a").word(5, 0));
  EXPECT_NE(word, Philox::named(1, "a").word(5, 1));
  EXPECT_NE(word, Philox::named(1, "a").word(6, 0));
  EXPECT_EQ(Philox::named(1, "a").word(7, 3), Philox::named(1, "a")(1, 3)[3]);
}

TEST(Philox, BatchedValuesEqualScalarValues) {
  const Philox random = Philox::named(5, "together");
  for (const uint64_t first : {0ULL, 1ULL, 2ULL, 3ULL, 17179869180ULL, 17179869183ULL, 123456789012345ULL})
    for (const uint64_t step : {0ULL, 1ULL << 40}) {
      float batch[64];
      cpu::vectorized([&] { random.uniforms<64>(first, step, batch); });
      for (uint64_t i = 0; i < 64; ++i) EXPECT_EQ(batch[i], random.uniform(first + i, step)) << first << " + " << i;
    }
}

TEST(Philox, SampledMomentsMatchDistributions) {
  const Philox random = Philox::named(3, "moments");
  constexpr int n = 200000;
  double mean = 0, square = 0, fourth = 0, uniform = 0;
  std::vector<int> counts(7);
  for (uint64_t i = 0; i < n; ++i) {
    const double z = random.normal(i);
    mean += z / n;
    square += z * z / n;
    fourth += z * z * z * z / n;
    uniform += static_cast<double>(random.uniform(i, 1)) / n;
    ++counts[random.below(7, i, 2)];
  }
  EXPECT_NEAR(mean, 0, 0.01);
  EXPECT_NEAR(square, 1, 0.015);
  EXPECT_NEAR(fourth, 3, 0.1);
  EXPECT_NEAR(uniform, 0.5, 0.003);
  for (const int c : counts) EXPECT_NEAR(c, n / 7.0, 800);
}

TEST(BFloat16, RoundsToNearestEven) {
  for (uint32_t high = 0; high < 0x10000; ++high)  // every bfloat16, and floats around each
    for (const uint32_t low : {0u, 1u, 0x7fffu, 0x8000u, 0x8001u, 0xffffu}) {
      const float x = std::bit_cast<float>(high << 16 | low);
      const auto found = static_cast<float>(bfloat16(x));
      if (std::isnan(x))
        ASSERT_TRUE(std::isnan(found)) << std::hex << (high << 16 | low);
      else  // bitwise, including the sign of zero
        ASSERT_EQ(std::bit_cast<uint32_t>(found), std::bit_cast<uint32_t>(static_cast<float>(nearest_bf16(x))))
            << std::hex << (high << 16 | low);
    }
}

// Error of a float in ulps of the true value.
double ulps(float found, double expected) {
  const auto nearest = static_cast<float>(expected);
  if (std::isinf(nearest) || nearest == 0) return found == nearest ? 0 : 1e9;
  int exponent = 0;
  std::frexp(expected, &exponent);
  return std::abs(static_cast<double>(found) - expected) / std::ldexp(1.0, std::max(exponent - 24, -149));
}

template <class F, class G>
double worst_ulps(float low, float high, const F& f, const G& exact) {
  double worst = 0;
  for (int64_t i = 0; i <= 4'000'000; ++i) {
    const auto x =
        static_cast<float>(static_cast<double>(low) +
                           (static_cast<double>(high) - static_cast<double>(low)) * static_cast<double>(i) / 4e6);
    worst = std::max(worst, ulps(f(x), exact(static_cast<double>(x))));
  }
  return worst;
}

TEST(Math, ExpAndTanhAreAccurate) {
  const auto exp = [](float x) { return math::exp(x); };
  const auto tanh = [](float x) { return math::tanh(x); };
  const double worst_exp = worst_ulps(-87.3f, 88.7f, exp, [](double x) { return std::exp(x); });
  const double worst_tanh = std::max(worst_ulps(-10, 10, tanh, [](double x) { return std::tanh(x); }),
                                     worst_ulps(-0.01f, 0.01f, tanh, [](double x) { return std::tanh(x); }));
  RecordProperty("exp_ulps", std::to_string(worst_exp));
  RecordProperty("tanh_ulps", std::to_string(worst_tanh));
  EXPECT_LT(worst_exp, 2.0);
  EXPECT_LT(worst_tanh, 3.0);
  EXPECT_EQ(math::exp(-200.0f), 0.0f);
  EXPECT_EQ(math::exp(-std::numeric_limits<float>::infinity()), 0.0f);
  EXPECT_EQ(math::exp(200.0f), std::numeric_limits<float>::infinity());
  EXPECT_EQ(math::exp(0.0f), 1.0f);
  EXPECT_TRUE(std::isnan(math::exp(std::nanf(""))));
  EXPECT_EQ(math::tanh(50.0f), 1.0f);
  EXPECT_EQ(math::tanh(-50.0f), -1.0f);
}

TEST(Math, NormalCdfIsAccurate) {
  const auto below = [](float x) { return math::normal_below(x, math::exp(-0.5f * x * x)); };
  const auto exact = [](double x) { return 0.5 * std::erfc(-x * M_SQRT1_2); };
  double worst = 0, worst_tail = 0;
  for (int i = -130000; i <= 130000; ++i) {
    const float x = static_cast<float>(i) * 1e-4F;
    const double error = std::abs(static_cast<double>(below(x)) - exact(static_cast<double>(x)));
    worst = std::max(worst, error);
    if (x > -5) worst_tail = std::max(worst_tail, error / exact(static_cast<double>(x)));
  }
  EXPECT_LT(worst, 2e-7);
  EXPECT_LT(worst_tail, 1e-6);
  EXPECT_EQ(below(40.0F), 1.0F);
  EXPECT_EQ(below(-40.0F), 0.0F);
  EXPECT_TRUE(std::isnan(below(std::nanf(""))));
  EXPECT_EQ(GeluErf::f(0.0F), 0.0F);
  EXPECT_DOUBLE_EQ(GeluErf::f(1.0), 0.8413447460685429);  // Phi(1)
}

// A kernel that computes element(x, i) on each of the three compiled instruction sets.
template <class F>
void expect_bitwise_equal_everywhere(const F& element, const char* what) {
  std::vector<float> x(1003), base(1003), other(1003);
  for (size_t i = 0; i < x.size(); ++i) x[i] = static_cast<float>(4 * Philox(9).normal(i));
  const auto run = [from = x.data(), n = std::ssize(x), &element](float* to) {
    for (int64_t i = 0; i < n; ++i) to[i] = element(from, i);
  };
  cpu::run_baseline([&] { run(base.data()); });
  for (const auto set : {cpu::InstructionSet::avx512, cpu::InstructionSet::avx2}) {
    if (set < cpu::instruction_set()) continue;  // not supported by this CPU
    cpu::run_on(set, [&] { run(other.data()); });
    EXPECT_EQ(std::memcmp(base.data(), other.data(), x.size() * sizeof(float)), 0)
        << what << " on " << (set == cpu::InstructionSet::avx2 ? "avx2" : "avx512");
  }
}

TEST(Math, ResultsAreBitwiseIdenticalOnAllInstructionSets) {
  UnaryOps::for_each([](auto op) {
    using Op = decltype(op);
    if (std::string(Op::name) == "log") return;  // from the C library; no kernel vectorizes it
    expect_bitwise_equal_everywhere([](const float* x, int64_t i) { return Op::f(x[i]); }, Op::name);
    expect_bitwise_equal_everywhere([](const float* x, int64_t i) { return Op::df(x[i]); }, Op::name);
  });
  expect_bitwise_equal_everywhere(
      [](const float* x, int64_t i) { return cpu::lane_sum<float>(i, [=](int64_t j) { return x[j]; }); }, "lane_sum");
  expect_bitwise_equal_everywhere(
      [](const float* x, int64_t i) { return cpu::lane_max<float>(i, -1e30f, [=](int64_t j) { return x[j]; }); },
      "lane_max");
}

template <class T>
void expect_same_products() {
  const Philox random(6);
  for (uint64_t round = 0; round < 40; ++round) {
    const auto size = [&](uint64_t i, uint64_t max_size) {
      return static_cast<int64_t>(1 + random.below(max_size, 8 * round + i));
    };
    const int64_t m = size(0, 13), k = size(1, 70), n = cpu::kLanes<T> * size(2, 6);
    std::vector<T> a(static_cast<size_t>(m * k)), b(static_cast<size_t>(k * n)), c(static_cast<size_t>(m * n));
    for (auto* v : {&a, &b, &c})
      for (size_t i = 0; i < v->size(); ++i) (*v)[i] = static_cast<T>(random.normal(i, round));
    std::vector<T> expected = c;
    for (int64_t i = 0; i < m; ++i)
      for (int64_t j = 0; j < n; ++j) {
        T& sum = expected[static_cast<size_t>(i * n + j)];
        for (int64_t p = 0; p < k; ++p)
          sum = math::fma(a[static_cast<size_t>(p * m + i)], b[static_cast<size_t>(p * n + j)], sum);
      }
    for (const auto isa : {cpu::InstructionSet::avx512, cpu::InstructionSet::avx2, cpu::InstructionSet::baseline}) {
      if (isa < cpu::instruction_set()) continue;  // not supported by this CPU
      std::vector<T> found = c;
      cpu::tile_gemm<T>(m, n, k, {a.data(), 1, m}, b.data(), n, found.data(), n, true, isa);
      EXPECT_EQ(std::memcmp(found.data(), expected.data(), found.size() * sizeof(T)), 0)
          << m << " x " << k << " x " << n;
    }
  }
}

TEST(TileGemm, AccumulatesInOneFmaChainOnAllInstructionSets) {
  expect_same_products<float>();
  expect_same_products<double>();
}

// Matmuls of any size, with row-major or column-major operands; one or two of the three sizes exceed a block.
template <class T>
void expect_same_blocks() {
  const Philox random(7);
  for (uint64_t round = 0; round < 48; ++round) {
    const std::array<uint64_t, 3> max_size = {210, 560, 1100};
    std::array<int64_t, 3> sizes;
    for (uint64_t i = 0; i < 3; ++i)
      sizes[i] = static_cast<int64_t>(
          1 + random.below(i == round % 3 ? 20 : max_size[i] >> (i == round / 3 % 3 ? 5 : 0), 4 * round + i));
    const auto [m, k, n] = sizes;
    std::vector<T> a(static_cast<size_t>(m * k)), b(static_cast<size_t>(k * n));
    for (auto* v : {&a, &b})
      for (size_t i = 0; i < v->size(); ++i) (*v)[i] = static_cast<T>(random.normal(i, round));
    const cpu::Strided<T> left = round & 1 ? cpu::Strided<T>{a.data(), 1, m} : cpu::Strided<T>{a.data(), k, 1};
    const cpu::Strided<T> right = round & 2 ? cpu::Strided<T>{b.data(), 1, k} : cpu::Strided<T>{b.data(), n, 1};
    const int64_t ld = n + static_cast<int64_t>(round % 5);
    std::vector<T> expected(static_cast<size_t>(m * ld), T(7)), found = expected;
    for (int64_t i = 0; i < m; ++i)
      for (int64_t j = 0; j < n; ++j) {
        T sum = 0;
        for (int64_t p = 0; p < k; ++p)
          sum = math::fma(left.data[i * left.row + p * left.col], right.data[p * right.row + j * right.col], sum);
        expected[static_cast<size_t>(i * ld + j)] = sum;
      }
    const int before = cpu::threads();
    cpu::set_threads(1 + static_cast<int>(round % 3));
    cpu::gemm<T>(m, n, k, left, right, found.data(), ld);
    cpu::set_threads(before);
    EXPECT_EQ(std::memcmp(found.data(), expected.data(), found.size() * sizeof(T)), 0)
        << m << " x " << k << " x " << n << ", round " << round;
  }
}

TEST(Gemm, AccumulatesInOneFmaChainForAnyBlocksAndThreads) {
  expect_same_blocks<float>();
  expect_same_blocks<double>();
}

// Copies to bfloat16 round once, to nearest even: contiguous or not, on any device.

// Floats of all exponents and signs, with mantissas on both sides of midpoints.
std::vector<double> floats() {
  const Philox random = Philox::named(1, "floats");
  std::vector<double> out;
  for (uint32_t high = 0; high < 1U << 16; high += 7)
    for (const uint32_t low :
         {0U, 1U, 0x7fffU, 0x8000U, 0x8001U, 0xffffU, static_cast<uint32_t>(random.below(1 << 16, high))}) {
      const float x = std::bit_cast<float>(high << 16 | (low & 0xffffU));
      if (!std::isnan(x)) out.push_back(static_cast<double>(x));
    }
  return out;
}

// Values closer to a midpoint than float can represent.
std::vector<double> doubles() {
  const Philox random = Philox::named(2, "doubles");
  std::vector<double> out;
  for (uint64_t i = 0; i < 2000; ++i) {
    const double even = std::ldexp(128 + static_cast<double>(random.below(128, i)), static_cast<int>(i % 40) - 20);
    const double half = even + 0.5 * test::unit_bf16(even);
    for (const double x : {half, std::nextafter(half, INFINITY), std::nextafter(half, 0.0), even * (1 + 1e-12)})
      for (const double sign : {-1.0, 1.0}) out.push_back(sign * x);
  }
  return out;
}

void expect_nearest(const std::vector<double>& from, DType dtype, const ArenaPtr& arena) {
  const auto n = std::ssize(from);
  const Tensor x = Tensor::of<double>(from, {n}, make_arena()).to(dtype).to(arena);
  Tensor strided = Tensor::empty({n, 3}, DType::bfloat16, arena).narrow(1, 1, 1).reshape({n});
  strided.copy_from(x);
  for (const Tensor& rounded : {x.to(DType::bfloat16), strided}) {
    const std::vector<double> found = test::host_values(rounded);
    for (size_t i = 0; i < from.size(); ++i) ASSERT_EQ(found[i], nearest_bf16(from[i])) << from[i];
  }
}

void expect_filled(const ArenaPtr& arena) {
  for (const double x : doubles()) {
    Tensor one = Tensor::empty({1}, DType::bfloat16, arena);
    one.fill(x);
    ASSERT_EQ(test::host_values(one)[0], nearest_bf16(x)) << x;
  }
}

TEST(Rounding, CopiesRoundToNearestEven) {
  EXPECT_EQ(nearest_bf16(1 + 1.0 / 256), 1);
  EXPECT_EQ(nearest_bf16(1 + 3.0 / 256), 1 + 4.0 / 256);
  expect_nearest(floats(), DType::float32, make_arena());
  expect_nearest(floats(), DType::float64, make_arena());
  expect_nearest(doubles(), DType::float64, make_arena());
  expect_filled(make_arena());
}

using RoundingGpu = test::OnGpu;

TEST_F(RoundingGpu, CopiesRoundToNearestEven) {
  expect_nearest(floats(), DType::float32, arena);
  expect_nearest(doubles(), DType::float64, arena);
  expect_filled(arena);
}

}  // namespace
}  // namespace tessera
