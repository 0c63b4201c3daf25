// Optimizers compared with the published formulas in float64 and with PyTorch; bitwise independence of sharding and
// threads; bfloat16 masters and stochastically rounded state; the gradient norm's fixed order, clipping, and the
// schedule.
#include "optim/optimizer.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <iterator>
#include <limits>
#include <map>
#include <numeric>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "optim/grad_norm.h"
#include "optim/lr_schedule.h"
#include "optim/rounding.h"
#include "tensor/cpu/vectorize.h"
#include "tests/support/gpu.h"
#include "tests/support/nearest.h"
#include "tests/support/python.h"
#include "tests/support/tensors.h"
#include "tests/support/units.h"

namespace tessera {
namespace {

using namespace test;

OptimizerKind optimizer_kind(std::string_view name) {
  return value_named<OptimizerKind>(kOptimizerNames, name).value();
}

constexpr const char* kNames[] = {"sgd", "adam", "adamw"};
const OptimizerOptions kOptions{.momentum = 0.9, .beta1 = 0.9, .beta2 = 0.95, .eps = 1e-8, .weight_decay = 0.1};

const OptimizerOptions kAllBf16{.beta2 = 0.95, .weight_decay = 0.1, .state = DType::bfloat16, .seed = 5};

// All constants differ, and eps is large enough for its position in the formula to matter.
const OptimizerOptions kDistinct{.momentum = 0.7, .beta1 = 0.85, .beta2 = 0.95, .eps = 0.03, .weight_decay = 0.2};
const OptimizerOptions kNoMomentum{.momentum = 0, .beta1 = 0, .beta2 = 0.6, .eps = 1e-3, .weight_decay = 0.2};

// One element, as published, in float64.
struct Reference {
  double p = 0, m = 0, v = 0;
  void step(std::string_view name, const OptimizerOptions& o, double g, double lr, int t, bool decay) {
    const bool decoupled = name == "adamw" || name == "muon";
    const double wd = decay ? o.weight_decay : 0;
    if (!decoupled) g += wd * p;
    if (name == "sgd") {
      m = o.momentum * m + g;
      p -= lr * m;
      return;
    }
    ASSERT_TRUE(name == "adam" || decoupled) << "no published formula of " << name;
    m = o.beta1 * m + (1 - o.beta1) * g;
    v = o.beta2 * v + (1 - o.beta2) * g * g;
    const double m_hat = m / (1 - std::pow(o.beta1, t)), v_hat = v / (1 - std::pow(o.beta2, t));
    p -= lr * (m_hat / (std::sqrt(v_hat) + o.eps) + (decoupled ? wd * p : 0));
  }
};

// A unit of random values, with gradients from the next seed.
FlatUnit random_unit(const std::vector<int64_t>& sizes, DType values, DType grads, uint64_t seed) {
  const FlatUnit unit = make_unit("u", sizes, values, grads, make_arena());
  fill_normal(unit, unit.values, seed, 1.0);
  fill_normal(unit, unit.grads, seed + 1, 1.0);
  return unit;
}

// The full-precision parameters.
Tensor precise(const Optimizer& optimizer) {
  for (const NamedTensor& s : optimizer.state())
    if (s.name.ends_with(".master")) return s.tensor;
  return optimizer.units()[0].values;
}

void compare_with_reference(std::string_view name, const OptimizerOptions& options, DType values, DType grads) {
  const FlatUnit unit = make_unit("u", {1, 37, 300, 8200, 16}, values, grads, make_arena());
  fill_normal(unit, unit.values, 1, 1.0);
  const auto optimizer = make_optimizer(optimizer_kind(name), {unit}, options);
  std::vector<Reference> reference(static_cast<size_t>(unit.values.numel()));
  const std::vector<double> start = host_values(unit.values);
  for (size_t i = 0; i < start.size(); ++i) reference[i].p = start[i];
  for (int t = 1; t <= 5; ++t) {
    fill_normal(unit, unit.grads, 100 + static_cast<uint64_t>(t), 0.3);
    const std::vector<double> g = host_values(unit.grads);
    const double lr = 0.01 * t;
    optimizer->step(lr, 0.5);
    for (const Slot& slot : unit.slots)
      for (int64_t i = slot.begin; i < slot.end(); ++i)
        reference[static_cast<size_t>(i)].step(name, options, 0.5 * g[static_cast<size_t>(i)], lr, t,
                                               slot.parameter->decays);
  }
  const std::vector<double> result = host_values(precise(*optimizer));
  const double bound = values == DType::float64 ? 1e-13 : 2e-6;
  for (size_t i = 0; i < result.size(); ++i)
    ASSERT_NEAR(result[i], reference[i].p, bound * (1 + std::abs(reference[i].p)))
        << name << " " << to_string(values) << " " << to_string(grads) << " element " << i;
  EXPECT_EQ(optimizer->steps(), 5);
}

TEST(Optimizer, UpdatesMatchPublishedFormulasInEveryDtype) {
  for (const std::string_view name : kOptimizerNames)  // muon updates vectors like adamw
    for (const OptimizerOptions& options : {kDistinct, kNoMomentum})
      for (const DType values : {DType::float64, DType::float32, DType::bfloat16})
        for (const DType grads : {DType::float64, DType::float32, DType::bfloat16})
          if ((values == DType::float64) == (grads == DType::float64))
            compare_with_reference(name, options, values, grads);
          else
            EXPECT_THROW(compare_with_reference(name, options, values, grads), Error);
}

// Each step starts from the stored values and state, and every result is one of the two bfloat16 neighbours of the
// formula's result.
TEST(Optimizer, Bfloat16StateMatchesPublishedFormulas) {
  for (const std::string_view name : kOptimizerNames) {
    OptimizerOptions options = kDistinct;
    options.state = DType::bfloat16;
    const FlatUnit unit = random_unit({1, 37, 300, 4100}, DType::bfloat16, DType::bfloat16, 7);
    const auto optimizer = make_optimizer(optimizer_kind(name), {unit}, options);
    std::vector<Tensor> stored{unit.values};
    for (const NamedTensor& s : optimizer->state()) stored.push_back(s.tensor);
    for (int t = 1; t <= 4; ++t) {
      fill_normal(unit, unit.grads, 100 + static_cast<uint64_t>(t), 0.3);
      const std::vector<double> g = host_values(unit.grads);
      std::vector<std::vector<double>> before(3, std::vector<double>(g.size()));
      for (size_t k = 0; k < stored.size(); ++k) before[k] = host_values(stored[k]);
      optimizer->step(0.02 * t, 0.5);
      std::vector<RoundingError> errors(stored.size());
      for (size_t k = 0; k < stored.size(); ++k) {
        const std::vector<double> found = host_values(stored[k]);
        for (const Slot& slot : unit.slots)
          for (auto i = static_cast<size_t>(slot.begin); i < static_cast<size_t>(slot.end()); ++i) {
            Reference r{before[0][i], before[1][i], before[2][i]};
            r.step(name, options, 0.5 * g[i], 0.02 * t, t, slot.parameter->decays);
            const double exact = k == 0 ? r.p : k == 1 ? r.m : r.v;
            ASSERT_LE(std::abs(found[i] - exact), 1.001 * unit_bf16(exact) + 1e-7)
                << name << " step " << t << " tensor " << k << " element " << i;
            errors[k].add(found[i], exact);
          }
        EXPECT_LE(std::abs(errors[k].mean()), errors[k].chance()) << name << " step " << t << " tensor " << k;
      }
    }
  }
}

// The shard [from, to) of a unit in separate memory, with the unit's slots relative to it.
FlatUnit make_shard(const FlatUnit& unit, int64_t from, int64_t to) {
  FlatUnit shard = unit;
  shard.values = unit.values.narrow(0, from, to - from).clone();
  shard.grads = unit.grads.narrow(0, from, to - from).clone();
  for (Slot& slot : shard.slots) slot.begin -= from;
  return shard;
}

void expect_shard_matches_full_unit(OptimizerKind kind, DType dtype, const OptimizerOptions& options) {
  const FlatUnit unit = random_unit({7, 1003, 20011, 5}, dtype, dtype, 3);
  const int64_t n = unit.values.numel();
  const std::vector<int64_t> cuts{0, 3, 500, 501, 9999, 10007, n - 1, n};
  std::vector<FlatUnit> shards;
  for (size_t i = 0; i + 1 < cuts.size(); ++i) shards.push_back(make_shard(unit, cuts[i], cuts[i + 1]));
  const auto unsharded = make_optimizer(kind, {unit}, options), parts = make_optimizer(kind, shards, options);
  for (int t = 0; t < 3; ++t) {
    unsharded->step(0.01, 0.7);
    parts->step(0.01, 0.7);
  }
  const size_t kinds = unsharded->state().size(), own = state_names(find_row(kind).rule).size();
  EXPECT_EQ(kinds, dtype == DType::bfloat16 && options.state != DType::bfloat16 ? own + 1 : own);  // and a master
  for (size_t k = 0; k < own; ++k)
    EXPECT_EQ(unsharded->state()[k].tensor.dtype() == DType::bfloat16, options.state == DType::bfloat16);
  for (size_t i = 0; i < shards.size(); ++i) {
    const auto part = [&](const Tensor& of) { return of.narrow(0, cuts[i], cuts[i + 1] - cuts[i]); };
    EXPECT_TRUE(bitwise_equal(shards[i].values, part(unit.values))) << "shard " << i;
    for (size_t k = 0; k < kinds; ++k)
      EXPECT_TRUE(bitwise_equal(parts->state()[i * kinds + k].tensor, part(unsharded->state()[k].tensor)))
          << "shard " << i;
  }
}

// Rounding is stochastic if everything is bfloat16.
TEST(Optimizer, ShardIsBitwiseEqualToFullUnit) {
  for (const std::string_view name : kOptimizerNames) {
    SCOPED_TRACE(name);
    for (const DType dtype : {DType::float64, DType::float32, DType::bfloat16})
      expect_shard_matches_full_unit(optimizer_kind(name), dtype, kOptions);
    expect_shard_matches_full_unit(optimizer_kind(name), DType::bfloat16, kAllBf16);
  }
}

TEST(Optimizer, UpdatesAreIndependentOfThreadsAndPaddingStaysZero) {
  const int before = cpu::threads();
  for (const std::string_view name : kOptimizerNames) {
    Tensor first;
    for (const int threads : {1, 2, 3}) {
      cpu::set_threads(threads);
      const FlatUnit unit = random_unit({50001, 3, 100, 40000}, DType::float32, DType::bfloat16, 5);
      const auto optimizer = make_optimizer(optimizer_kind(name), {unit}, kOptions);
      for (int t = 0; t < 3; ++t) optimizer->step(0.01, 1.0);
      if (threads == 1) first = unit.values;
      EXPECT_TRUE(bitwise_equal(unit.values, first)) << name << threads;
      for (size_t s = 0; s < unit.slots.size(); ++s) {
        const int64_t end = s + 1 < unit.slots.size() ? unit.slots[s + 1].begin : unit.values.numel();
        for (int64_t i = unit.slots[s].end(); i < end; ++i) EXPECT_EQ(unit.values.data<float>()[i], 0.0f);
      }
    }
  }
  cpu::set_threads(before);
}

TEST(Optimizer, RestoredStateResumesBitwise) {
  FlatUnit unit = random_unit({100, 20}, DType::bfloat16, DType::float32, 1);
  unit.name = "blocks.0";
  const ArenaPtr& arena = unit.values.arena();
  const uint64_t version = unit.values.storage()->version;
  const auto first = make_optimizer(OptimizerKind::adamw, {unit}, kOptions);
  EXPECT_EQ(arena->usage(Category::optimizer).live, 3 * 4 * unit.values.numel());
  first->step(0.01, 1.0);
  EXPECT_EQ(unit.values.storage()->version, version + 1);
  ASSERT_EQ(first->state().size(), 3u);
  FlatUnit copy = unit;
  copy.values = unit.values.clone();
  const auto second = make_optimizer(OptimizerKind::adamw, {copy}, kOptions);
  for (size_t i = 0; i < 3; ++i) {
    EXPECT_EQ(first->state()[i].name, (std::array{"blocks.0.m", "blocks.0.v", "blocks.0.master"}.at(i)));
    Tensor(second->state()[i].tensor).copy_from(first->state()[i].tensor);
  }
  second->set_steps(first->steps());
  first->step(0.01, 1.0);
  second->step(0.01, 1.0);
  EXPECT_TRUE(bitwise_equal(unit.values, copy.values));
  EXPECT_TRUE(bitwise_equal(first->state()[2].tensor, second->state()[2].tensor));
}

TEST(Optimizer, RejectsMismatchedArguments) {
  const ArenaPtr arena = make_arena();
  FlatUnit unit = make_unit("u", {100, 20}, DType::float32, DType::float32, arena);
  EXPECT_THROW(make_optimizer(OptimizerKind::adam, {unit}, {.beta1 = 1.0}), Error);
  EXPECT_THROW(make_optimizer(OptimizerKind::adam, {unit}, {.weight_decay = -1}), Error);
  FlatUnit short_grads = unit;
  short_grads.grads = unit.grads.narrow(0, 0, 16);
  EXPECT_THROW(make_optimizer(OptimizerKind::adam, {short_grads}, kOptions), Error);
  unit.slots[1].begin = 50;
  EXPECT_THROW(make_optimizer(OptimizerKind::adam, {unit}, kOptions), Error);
}

// Five steps of each optimizer compared with PyTorch's.

constexpr int kSteps = 5;

TEST(Optimizer, MatchesPyTorch) {
  if (const std::string why = test::missing("torch"); !why.empty()) GTEST_SKIP() << why;
  const test::Exchange exchange;
  const FlatUnit unit = make_unit("u", {4096}, DType::float32, DType::float32, make_arena());
  std::vector<float> grads;
  for (uint64_t t = 0; t < kSteps; ++t) {
    fill_normal(unit, unit.grads, 10 + t, 0.3);
    std::ranges::copy(unit.grads.to_vector<float>(), std::back_inserter(grads));
  }
  exchange.write("grads.bin", std::span<const float>(grads));
  const auto n = static_cast<size_t>(unit.values.numel());
  for (const char* name : kNames) {
    fill_normal(unit, unit.values, 1, 1.0);
    exchange.write("values.bin", std::span<const float>(unit.values.to_vector<float>()));
    exchange.run(TESSERA_SOURCE_DIR "/tests/compare/optimizer_pytorch.py", fmt::format("{} {}", name, kSteps));
    const std::vector<float> expected = exchange.read<float>("result.bin");
    ASSERT_EQ(expected.size(), n);
    const auto optimizer = make_optimizer(optimizer_kind(name), {unit}, {.beta2 = 0.95, .weight_decay = 0.1});
    for (size_t t = 0; t < kSteps; ++t) {
      std::copy_n(grads.begin() + static_cast<std::ptrdiff_t>(t * n), n, unit.grads.data<float>());
      optimizer->step(0.01 * static_cast<double>(t + 1), 1.0);
    }
    for (size_t i = 0; i < n; ++i)
      ASSERT_NEAR(unit.values.data<float>()[i], expected[i], 1e-6 * (1 + std::abs(expected[i]))) << name << " " << i;
  }
}

// An update stores bfloat16 values as the float32 master rounded to nearest even.

void expect_rounded(const ArenaPtr& arena) {
  for (const std::string_view name : kOptimizerNames)
    for (const DType grads : {DType::float32, DType::bfloat16}) {
      FlatUnit unit = random_unit({1000, 77}, DType::bfloat16, grads, 1);
      unit.values = unit.values.to(arena);
      unit.grads = unit.grads.to(arena);
      const auto optimizer = make_optimizer(optimizer_kind(name), {unit}, {.weight_decay = 0.1});
      for (int step = 0; step < 43; ++step) {
        optimizer->step(step < 3 ? 0.01 : 1e-4, step < 3 ? 0.7 : 1);
        if (step >= 3 && step < 42) continue;  // 40 steps, each too small for bfloat16, which the master accumulates
        const std::vector<double> values = host_values(unit.values), master = host_values(precise(*optimizer));
        ASSERT_EQ(precise(*optimizer).dtype(), DType::float32);
        int64_t between = 0;
        for (size_t i = 0; i < master.size(); ++i) {
          ASSERT_EQ(bfloat16(static_cast<float>(values[i])).bits,
                    bfloat16(static_cast<float>(test::nearest_bf16(master[i]))).bits)
              << step << " " << i;
          between += values[i] != master[i] ? 1 : 0;
        }
        EXPECT_GT(between, 1000);
      }
    }
}

TEST(Rounding, UpdatesRoundToNearestEven) { expect_rounded(make_arena()); }

using RoundingGpu = test::OnGpu;

TEST_F(RoundingGpu, UpdatesRoundToNearestEven) { expect_rounded(arena); }

// Stochastic rounding and bfloat16 state: means, bitwise equality of shards, small steps.

TEST(StochasticRounding, ChoosesNeighbourAndIsUnbiased) {
  const Philox random(7);
  for (uint64_t trial = 0; trial < 40; ++trial) {
    const auto x = static_cast<float>(random.normal(trial) * std::pow(10.0, static_cast<double>(trial % 9) - 4));
    constexpr int kSamples = 20000;
    double sum = 0;
    float low = std::numeric_limits<float>::infinity(), high = -low;
    for (int i = 0; i < kSamples; ++i) {
      const auto y = static_cast<float>(round_stochastically(x, random.word(static_cast<uint64_t>(i), trial + 1)));
      low = std::min(low, y), high = std::max(high, y);
      sum += static_cast<double>(y);
    }
    EXPECT_LE(low, x);
    EXPECT_GE(high, x);
    const double gap = std::ldexp(std::abs(static_cast<double>(x)), -7);  // at least the distance between neighbours
    EXPECT_LE(static_cast<double>(high - low), gap);
    EXPECT_NEAR(sum / kSamples, static_cast<double>(x), 4 * gap / 2 / std::sqrt(kSamples)) << x;
  }
}

TEST(StochasticRounding, PreservesRepresentableAndNonFiniteValues) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  for (const uint32_t bits : {0u, 1u, 0x8000u, 0xffffu, 0xffffffffu}) {
    for (const float x : {0.0f, -0.0f, 1.0f, -2.5f, 0x1p-133f, kInfinity, -kInfinity})
      EXPECT_EQ(round_stochastically(x, bits).bits, bfloat16(x).bits) << x << " " << bits;
    EXPECT_TRUE(std::isnan(static_cast<float>(round_stochastically(std::nanf(""), bits))));
  }
}

// Steps of a hundredth of the last bit: rounding to nearest loses each, stochastic rounding none on average.
TEST(StochasticRounding, AccumulatesSmallSteps) {
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

// Each element of a tensor-parallel shard is rounded by its index in the full parameter.
TEST(StochasticRounding, ShardIsBitwiseEqualToFullParameter) {
  constexpr int64_t kRows = 6, kColumns = 701;
  const FlatUnit unsharded = random_unit({kRows * kColumns}, DType::bfloat16, DType::bfloat16, 3),
                 cut = random_unit({kRows / 2 * kColumns}, DType::bfloat16, DType::bfloat16, 3);
  Parameter &of_unsharded = *unsharded.slots[0].parameter, &of_cut = *cut.slots[0].parameter;
  of_cut.name = of_unsharded.name;
  of_cut.full_shape = of_unsharded.full_shape = Shape{kRows, kColumns};
  of_cut.decays = of_unsharded.decays;
  of_cut.shard = {.axis = "tp", .dim = 0, .runs = {{0, 1}, {2, 1}, {4, 1}}};
  const auto in_cut = [](const Tensor& t, int64_t row) { return t.narrow(0, row / 2 * kColumns, kColumns); };
  const auto in_unsharded = [](const Tensor& t, int64_t row) { return t.narrow(0, row * kColumns, kColumns); };
  for (const Tensor FlatUnit::*buffer : {&FlatUnit::values, &FlatUnit::grads})
    for (int64_t row = 0; row < kRows; row += 2)
      in_cut(cut.*buffer, row).copy_from(in_unsharded(unsharded.*buffer, row));
  const auto one = make_optimizer(OptimizerKind::adamw, {unsharded}, kAllBf16),
             other = make_optimizer(OptimizerKind::adamw, {cut}, kAllBf16);
  for (int t = 0; t < 3; ++t) {
    one->step(0.01, 1);
    other->step(0.01, 1);
  }
  for (int64_t row = 0; row < kRows; row += 2)
    EXPECT_TRUE(bitwise_equal(in_cut(cut.values, row), in_unsharded(unsharded.values, row))) << "row " << row;
}

// The gradient norm's fixed order, clipping, and the learning rate schedule.

const std::vector<int64_t> kSizes{1, 255, 256, 257, 10000, 7, 70001};

TEST(GradNorm, IsExactForOnes) {
  const auto n = std::accumulate(kSizes.begin(), kSizes.end(), int64_t{0});
  for (const DType dtype : {DType::float64, DType::float32, DType::bfloat16}) {
    const FlatUnit unit = make_unit("u", kSizes, dtype, dtype, make_arena());
    fill_slots(unit, unit.grads, [](const Slot&, int64_t) { return 1.0; });
    EXPECT_EQ(grad_norm(std::array{unit}), std::sqrt(static_cast<double>(n)));
  }
}

TEST(GradNorm, IsIndependentOfThreads) {
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
    for (const double g : host_values(unit.grads)) exact += static_cast<long double>(g) * g;
    EXPECT_NEAR(norm, static_cast<double>(std::sqrt(exact)), 1e-13 * norm);
  }
  cpu::set_threads(before);
}

std::vector<double> sums_of_blocks(const Tensor& grads) {
  const Tensor sums = grads.make({norm_blocks(grads.numel())}, DType::float64);
  block_sums(grads, sums);
  return sums.to_vector<double>();
}

TEST(GradNorm, BlockSumsOfAlignedShardsMatchFullUnit) {
  const FlatUnit unit = make_unit("u", {300, 1'200'000, 7, 70001}, DType::float32, DType::float32, make_arena());
  fill_normal(unit, unit.grads, 1, 1.0);
  const int64_t n = unit.grads.numel();
  std::vector<double> parts;
  const std::vector<double> unsharded = sums_of_blocks(unit.grads);
  for (const auto& [from, to] :
       {std::pair{int64_t{0}, 3 * kNormBlock}, {3 * kNormBlock, 100 * kNormBlock}, {100 * kNormBlock, n}})
    std::ranges::copy(sums_of_blocks(unit.grads.narrow(0, from, to - from)), std::back_inserter(parts));
  EXPECT_EQ(parts, unsharded);
  double total = 0;
  for (auto group = unsharded.begin(); group != unsharded.end();) {
    const auto end = group + std::min<std::ptrdiff_t>(256, unsharded.end() - group);
    total += std::accumulate(std::exchange(group, end), end, 0.0);
  }
  EXPECT_EQ(total, sum_of_squares(std::array{unit}));
}

// A frozen unit has no gradient, and its memory is not read.
TEST(GradNorm, CoversOnlyTrainableUnits) {
  const FlatUnit first = random_unit({300, 70001}, DType::float32, DType::bfloat16, 3),
                 second = random_unit({7}, DType::float64, DType::float64, 5);
  FlatUnit frozen = random_unit({50}, DType::float32, DType::float32, 9);
  frozen.slots[0].parameter->trainable = false;
  frozen.grads = Tensor();
  double squares = 0;
  for (const FlatUnit& unit : {first, second})
    for (const double g : host_values(unit.grads)) squares += g * g;
  EXPECT_NEAR(grad_norm(std::array{first, frozen, second}), std::sqrt(squares), 1e-13 * std::sqrt(squares));
}

TEST(GradNorm, PropagatesNonFiniteValues) {
  const FlatUnit unit = make_unit("u", kSizes, DType::float32, DType::float32, make_arena());
  unit.grads.data<float>()[600] = std::numeric_limits<float>::infinity();
  EXPECT_TRUE(std::isinf(grad_norm(std::array{unit})));
  unit.grads.data<float>()[unit.slots.back().begin + 70000] = std::numeric_limits<float>::quiet_NaN();
  EXPECT_TRUE(std::isnan(grad_norm(std::array{unit})));
}

TEST(ClipFactor, MatchesPyTorch) {
  EXPECT_EQ(clip_factor(5.0, 0), 1.0);
  EXPECT_EQ(clip_factor(0.5, 1.0), 1.0);
  EXPECT_EQ(clip_factor(4.0, 1.0), 1.0 / (4.0 + 1e-6));
  EXPECT_EQ(clip_factor(std::numeric_limits<double>::infinity(), 1.0), 0.0);
  EXPECT_TRUE(std::isnan(clip_factor(std::numeric_limits<double>::quiet_NaN(), 1.0)));
  EXPECT_THROW(clip_factor(1.0, -1.0), Error);
}

TEST(LrSchedule, WarmsUpThenFollowsCosine) {
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
  const LrSchedule warm{.lr = 2, .min_lr = 2, .warmup = 4, .steps = 10}, none{.lr = 2, .min_lr = 1, .steps = 2};
  for (const int64_t step : {0, 1, 2, 3, 4, 9, 10, 99})
    EXPECT_DOUBLE_EQ(warm.at(step), step < 4 ? 0.4 * static_cast<double>(step + 1) : 2) << step;
  for (const int64_t step : {0, 1, 2, 3}) EXPECT_DOUBLE_EQ(none.at(step), step == 0 ? 2 : step == 1 ? 1.5 : 1) << step;
}

}  // namespace
}  // namespace tessera
