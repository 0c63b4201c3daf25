// The gradient norm's fixed order, clipping, and the learning rate schedule.
#include "optim/grad_norm.h"

#include <gtest/gtest.h>

#include <limits>

#include "optim/lr_schedule.h"
#include "tensor/cpu/vectorize.h"
#include "tests/support/units.h"

namespace tessera {
namespace {

using test::fill_normal;
using test::fill_slots;
using test::make_unit;

const std::vector<int64_t> kSizes{1, 255, 256, 257, 10000, 7, 70001};

TEST(GradNorm, OnesGiveExactlyTheRootOfTheirNumber) {
  int64_t n = 0;
  for (const int64_t size : kSizes) n += size;
  for (const DType dtype : {DType::float64, DType::float32, DType::bfloat16}) {
    const FlatUnit unit = make_unit("u", kSizes, dtype, dtype, make_arena());
    fill_slots(unit, unit.grads, [](const Slot&, int64_t) { return 1.0; });
    EXPECT_EQ(grad_norm(std::array{unit}), std::sqrt(static_cast<double>(n)));
  }
}

TEST(GradNorm, ThreadsDoNotChangeABit) {
  const int before = cpu::threads();
  for (const DType dtype : {DType::float64, DType::float32, DType::bfloat16}) {
    const FlatUnit unit = make_unit("u", kSizes, dtype, dtype, make_arena());
    fill_normal(unit, unit.grads, 1, 1.0);
    cpu::set_threads(1);
    const double norm = grad_norm(std::array{unit});
    for (const int threads : {1, 2, 3}) {
      cpu::set_threads(threads);
      EXPECT_EQ(grad_norm(std::array{unit}), norm);
    }
    long double exact = 0;
    for (const double g : unit.grads.to(DType::float64).to_vector<double>()) exact += static_cast<long double>(g) * g;
    EXPECT_NEAR(norm, static_cast<double>(std::sqrt(exact)), 1e-13 * norm);
  }
  cpu::set_threads(before);
}

std::vector<double> sums_of_blocks(const Tensor& grads) {
  const Tensor sums = grads.make({norm_blocks(grads.numel())}, DType::float64);
  block_sums(grads, sums);
  return sums.to_vector<double>();
}

TEST(GradNorm, ShardsCutAtBlocksHaveTheBlocksOfTheWhole) {
  const FlatUnit unit = make_unit("u", {300, 1'200'000, 7, 70001}, DType::float32, DType::float32, make_arena());
  fill_normal(unit, unit.grads, 1, 1.0);
  const int64_t n = unit.grads.numel();
  std::vector<double> parts;
  const std::vector<double> whole = sums_of_blocks(unit.grads);
  for (const auto& [from, to] :
       {std::pair{int64_t{0}, 3 * kNormBlock}, {3 * kNormBlock, 100 * kNormBlock}, {100 * kNormBlock, n}}) {
    const std::vector<double> part = sums_of_blocks(unit.grads.narrow(0, from, to - from));
    parts.insert(parts.end(), part.begin(), part.end());
  }
  EXPECT_EQ(parts, whole);
  double total = 0, group = 0;
  for (size_t i = 0; i < whole.size(); ++i) {
    group += whole[i];
    if ((i + 1) % 256 != 0 && i + 1 < whole.size()) continue;
    total += group;
    group = 0;
  }
  EXPECT_EQ(total, sum_of_squares(std::array{unit}));
}

TEST(GradNorm, NonFiniteComesOut) {
  const FlatUnit unit = make_unit("u", kSizes, DType::float32, DType::float32, make_arena());
  unit.grads.data<float>()[600] = std::numeric_limits<float>::infinity();
  EXPECT_TRUE(std::isinf(grad_norm(std::array{unit})));
  unit.grads.data<float>()[unit.slots.back().begin + 70000] = std::numeric_limits<float>::quiet_NaN();
  EXPECT_TRUE(std::isnan(grad_norm(std::array{unit})));
}

TEST(ClipFactor, IsPyTorchsRule) {
  EXPECT_EQ(clip_factor(5.0, 0), 1.0);
  EXPECT_EQ(clip_factor(0.5, 1.0), 1.0);
  EXPECT_EQ(clip_factor(4.0, 1.0), 1.0 / (4.0 + 1e-6));
  EXPECT_EQ(clip_factor(std::numeric_limits<double>::infinity(), 1.0), 0.0);
  EXPECT_TRUE(std::isnan(clip_factor(std::numeric_limits<double>::quiet_NaN(), 1.0)));
  EXPECT_THROW(clip_factor(1.0, -1.0), Error);
}

TEST(LrSchedule, WarmsUpThenFollowsTheCosine) {
  const LrSchedule s{.lr = 1.0, .min_lr = 0.1, .warmup = 9, .steps = 109};
  EXPECT_DOUBLE_EQ(s.at(0), 0.1);
  EXPECT_DOUBLE_EQ(s.at(8), 0.9);
  EXPECT_DOUBLE_EQ(s.at(9), 1.0);
  EXPECT_DOUBLE_EQ(s.at(59), 0.55);
  EXPECT_NEAR(s.at(34), 0.1 + 0.45 * (1 + std::sqrt(0.5)), 1e-15);
  EXPECT_EQ(s.at(109), 0.1);
  EXPECT_EQ(s.at(1000), 0.1);
  const LrSchedule constant{.lr = 3e-4, .min_lr = 3e-4, .warmup = 0, .steps = 10};
  for (const int64_t step : {0, 5, 10, 99}) EXPECT_EQ(constant.at(step), 3e-4);
}

}  // namespace
}  // namespace tessera
