// Numbers that become bfloat16 by a copy are rounded once, to nearest even: contiguous or not, on any device.

#include "tensor/random.h"
#include "tensor/tensor.h"
#include "tests/support/gpu.h"
#include "tests/support/nearest.h"

namespace tessera {
namespace {

using test::nearest_bf16;

// All exponents and signs, and fractions on both sides of every half.
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

// Beside a half by less than a float can say.
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
    const std::vector<double> found = rounded.to(DType::float64).to_vector<double>();
    for (size_t i = 0; i < from.size(); ++i) ASSERT_EQ(found[i], nearest_bf16(from[i])) << from[i];
  }
}

void expect_filled(const ArenaPtr& arena) {
  for (const double x : doubles()) {
    Tensor one = Tensor::empty({1}, DType::bfloat16, arena);
    one.fill(x);
    ASSERT_EQ(one.to(DType::float64).to_vector<double>()[0], nearest_bf16(x)) << x;
  }
}

TEST(Rounding, OfCopiesIsToNearestEven) {
  EXPECT_EQ(nearest_bf16(1 + 1.0 / 256), 1);
  EXPECT_EQ(nearest_bf16(1 + 3.0 / 256), 1 + 4.0 / 256);
  expect_nearest(floats(), DType::float32, make_arena());
  expect_nearest(floats(), DType::float64, make_arena());
  expect_nearest(doubles(), DType::float64, make_arena());
  expect_filled(make_arena());
}

using RoundingGpu = test::OnGpu;

TEST_F(RoundingGpu, OfCopiesIsToNearestEven) {
  expect_nearest(floats(), DType::float32, arena);
  expect_nearest(doubles(), DType::float64, arena);
  expect_filled(arena);
}

}  // namespace
}  // namespace tessera
