// Stochastic rounding, and optimizers whose state is bfloat16: means, bits of shards and cut parameters, small steps.

#include <limits>

#include "optim/optimizer.h"
#include "optim/rounding.h"
#include "tests/support/tensors.h"
#include "tests/support/units.h"

namespace tessera {
namespace {

using test::fill_normal;
using test::make_unit;
using test::same_bits;

constexpr OptimizerKind kKinds[] = {OptimizerKind::sgd, OptimizerKind::adam, OptimizerKind::adamw};
const OptimizerOptions kAllBf16{.beta2 = 0.95, .weight_decay = 0.1, .state = DType::bfloat16, .seed = 5};

FlatUnit bf16_unit(const std::vector<int64_t>& sizes) {
  const FlatUnit unit = make_unit("u", sizes, DType::bfloat16, DType::bfloat16, make_arena());
  fill_normal(unit, unit.values, 3, 1.0);
  fill_normal(unit, unit.grads, 4, 1.0);
  return unit;
}

TEST(StochasticRounding, TakesANeighbourAndIsRightOnAverage) {
  const Philox random(7);
  for (uint64_t trial = 0; trial < 40; ++trial) {
    const auto x = static_cast<float>(random.normal(trial) * std::pow(10.0, static_cast<double>(trial % 9) - 4));
    constexpr int kDraws = 20000;
    double sum = 0;
    float low = std::numeric_limits<float>::infinity(), high = -low;
    for (int i = 0; i < kDraws; ++i) {
      const auto y = static_cast<float>(round_stochastically(x, random.word(static_cast<uint64_t>(i), trial + 1)));
      low = std::min(low, y), high = std::max(high, y);
      sum += static_cast<double>(y);
    }
    EXPECT_LE(low, x);
    EXPECT_GE(high, x);
    const double gap = std::ldexp(std::abs(static_cast<double>(x)), -7);  // at least that between neighbours
    EXPECT_LE(static_cast<double>(high - low), gap);
    EXPECT_NEAR(sum / kDraws, static_cast<double>(x), 4 * gap / 2 / std::sqrt(kDraws)) << x;
  }
}

TEST(StochasticRounding, LeavesWhatBfloat16HasAndWhatIsNotFinite) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  for (const uint32_t bits : {0u, 1u, 0x8000u, 0xffffu, 0xffffffffu}) {
    for (const float x : {0.0f, -0.0f, 1.0f, -2.5f, 0x1p-133f, kInfinity, -kInfinity})
      EXPECT_EQ(round_stochastically(x, bits).bits, bfloat16(x).bits) << x << " " << bits;
    EXPECT_TRUE(std::isnan(static_cast<float>(round_stochastically(std::nanf(""), bits))));
  }
}

// Steps of a hundredth of the last bit: each is lost when it is rounded to nearest, and none on average here.
TEST(StochasticRounding, SmallStepsAddUp) {
  FlatUnit unit = make_unit("u", {40000}, DType::bfloat16, DType::float32, make_arena());
  unit.values.fill(1.25);
  unit.grads.fill(1);
  OptimizerOptions o{.momentum = 0, .state = DType::bfloat16, .seed = 1};
  const auto sgd = make_optimizer(OptimizerKind::sgd, {unit}, o);
  for (int t = 0; t < 50; ++t) sgd->step(0x1p-7 / 100, 1);
  double sum = 0;
  for (int64_t i = 0; i < 40000; ++i) sum += static_cast<double>(unit.values.data<bfloat16>()[i]);
  EXPECT_NEAR(sum / 40000, 1.25 - 50 * 0x1p-7 / 100, 2e-4);
  EXPECT_TRUE(sgd->state().empty());
}

TEST(StochasticRounding, AShardGetsTheBitsOfTheWhole) {
  for (const OptimizerKind kind : kKinds) {
    const FlatUnit unit = bf16_unit({7, 1003, 20011, 5});
    const int64_t n = unit.values.numel();
    const std::vector<int64_t> cuts{0, 3, 500, 501, 9999, 10007, n - 1, n};
    std::vector<FlatUnit> shards;
    for (size_t i = 0; i + 1 < cuts.size(); ++i) {
      FlatUnit shard = unit;
      shard.values = unit.values.narrow(0, cuts[i], cuts[i + 1] - cuts[i]).clone();
      shard.grads = unit.grads.narrow(0, cuts[i], cuts[i + 1] - cuts[i]).clone();
      for (Slot& slot : shard.slots) slot.begin -= cuts[i];
      shards.push_back(shard);
    }
    const auto whole = make_optimizer(kind, {unit}, kAllBf16), parts = make_optimizer(kind, shards, kAllBf16);
    for (int t = 0; t < 3; ++t) {
      whole->step(0.01, 0.7);
      parts->step(0.01, 0.7);
    }
    const size_t kinds = whole->state().size();
    EXPECT_EQ(kinds, kind == OptimizerKind::sgd ? 1u : 2u);
    for (size_t i = 0; i < shards.size(); ++i) {
      const int64_t length = cuts[i + 1] - cuts[i];
      EXPECT_TRUE(same_bits(shards[i].values, unit.values.narrow(0, cuts[i], length))) << "shard " << i;
      for (size_t k = 0; k < kinds; ++k) {
        ASSERT_EQ(whole->state()[k].tensor.dtype(), DType::bfloat16);
        EXPECT_TRUE(
            same_bits(parts->state()[i * kinds + k].tensor, whole->state()[k].tensor.narrow(0, cuts[i], length)));
      }
    }
  }
}

// Each element of a parameter that tensor parallelism cut is rounded by its index in the whole.
TEST(StochasticRounding, ACutParameterGetsTheBitsOfTheWhole) {
  constexpr int64_t kRows = 6, kColumns = 701;
  const FlatUnit whole = bf16_unit({kRows * kColumns}), cut = bf16_unit({kRows / 2 * kColumns});
  Parameter &of_whole = *whole.slots[0].parameter, &of_cut = *cut.slots[0].parameter;
  of_cut.name = of_whole.name;
  of_cut.whole = of_whole.whole = Shape{kRows, kColumns};
  of_cut.decays = of_whole.decays;
  of_cut.shard = {.axis = "tp", .dim = 0, .runs = {{0, 1}, {2, 1}, {4, 1}}};
  for (const Tensor FlatUnit::*buffer : {&FlatUnit::values, &FlatUnit::grads})
    for (int64_t row = 0; row < kRows; row += 2)
      (cut.*buffer)
          .narrow(0, row / 2 * kColumns, kColumns)
          .copy_from((whole.*buffer).narrow(0, row * kColumns, kColumns));
  const auto one = make_optimizer(OptimizerKind::adamw, {whole}, kAllBf16),
             other = make_optimizer(OptimizerKind::adamw, {cut}, kAllBf16);
  for (int t = 0; t < 3; ++t) {
    one->step(0.01, 1);
    other->step(0.01, 1);
  }
  for (int64_t row = 0; row < kRows; row += 2)
    EXPECT_TRUE(
        same_bits(cut.values.narrow(0, row / 2 * kColumns, kColumns), whole.values.narrow(0, row * kColumns, kColumns)))
        << "row " << row;
}

}  // namespace
}  // namespace tessera
