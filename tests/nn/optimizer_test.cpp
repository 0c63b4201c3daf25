// Optimizers against the published formulas in float64, and the bits of shards, threads and bfloat16 masters.
#include "optim/optimizer.h"

#include "tensor/cpu/vectorize.h"
#include "tests/support/tensors.h"
#include "tests/support/units.h"

namespace tessera {
namespace {

OptimizerKind kind_of(std::string_view name) { return value_named<OptimizerKind>(kOptimizerNames, name).value(); }

using test::fill_normal;
using test::make_unit;
using test::numbers;
using test::same_bits;

constexpr const char* kNames[] = {"sgd", "adam", "adamw"};
const OptimizerOptions kOptions{.momentum = 0.9, .beta1 = 0.9, .beta2 = 0.95, .eps = 1e-8, .weight_decay = 0.1};

// One element, as the papers write it, in float64.
struct Reference {
  double p = 0, m = 0, v = 0;
  void step(const std::string& name, double g, double lr, int t, bool decay) {
    const double wd = decay ? kOptions.weight_decay : 0;
    if (name != "adamw") g += wd * p;
    if (name == "sgd") {
      m = kOptions.momentum * m + g;
      p -= lr * m;
      return;
    }
    m = kOptions.beta1 * m + (1 - kOptions.beta1) * g;
    v = kOptions.beta2 * v + (1 - kOptions.beta2) * g * g;
    const double m_hat = m / (1 - std::pow(kOptions.beta1, t)), v_hat = v / (1 - std::pow(kOptions.beta2, t));
    p -= lr * (m_hat / (std::sqrt(v_hat) + kOptions.eps) + (name == "adamw" ? wd * p : 0));
  }
};

// The tensor that holds the full-precision parameters.
Tensor precise(const Optimizer& optimizer) {
  for (const NamedTensor& s : optimizer.state())
    if (s.name.ends_with(".master")) return s.tensor;
  return optimizer.units()[0].values;
}

void compare_with_reference(const std::string& name, DType values, DType grads) {
  const FlatUnit unit = make_unit("u", {1, 37, 300, 8200, 16}, values, grads, make_arena());
  fill_normal(unit, unit.values, 1, 1.0);
  const auto optimizer = make_optimizer(kind_of(name), {unit}, kOptions);
  std::vector<Reference> reference(static_cast<size_t>(unit.values.numel()));
  const std::vector<double> start = numbers(unit.values);
  for (size_t i = 0; i < start.size(); ++i) reference[i].p = start[i];
  for (int t = 1; t <= 5; ++t) {
    fill_normal(unit, unit.grads, 100 + static_cast<uint64_t>(t), 0.3);
    const std::vector<double> g = numbers(unit.grads);
    const double lr = 0.01 * t;
    optimizer->step(lr, 0.5);
    for (const Slot& slot : unit.slots)
      for (int64_t i = slot.begin; i < slot.end(); ++i)
        reference[static_cast<size_t>(i)].step(name, 0.5 * g[static_cast<size_t>(i)], lr, t, slot.parameter->decays);
  }
  const std::vector<double> result = numbers(precise(*optimizer));
  const double bound = values == DType::float64 ? 1e-13 : 2e-6;
  for (size_t i = 0; i < result.size(); ++i)
    ASSERT_NEAR(result[i], reference[i].p, bound * (1 + std::abs(reference[i].p)))
        << name << " " << name_of(values) << " " << name_of(grads) << " element " << i;
  EXPECT_EQ(optimizer->steps(), 5);
}

TEST(Optimizer, FollowsThePublishedFormulasInEveryDtype) {
  for (const char* name : kNames)
    for (const DType values : {DType::float64, DType::float32, DType::bfloat16})
      for (const DType grads : {DType::float64, DType::float32, DType::bfloat16})
        compare_with_reference(name, values, grads);
}

TEST(Optimizer, Bfloat16ValuesAreTheRoundedMaster) {
  for (const char* name : kNames) {
    const FlatUnit unit = make_unit("u", {1000, 33}, DType::bfloat16, DType::float32, make_arena());
    fill_normal(unit, unit.values, 1, 1.0);
    const auto optimizer = make_optimizer(kind_of(name), {unit}, kOptions);
    fill_normal(unit, unit.grads, 2, 1.0);
    // Steps of 1e-4 are lost in bfloat16 one by one, and add up in the master.
    for (int t = 0; t < 40; ++t) optimizer->step(1e-4, 1.0);
    const Tensor master = precise(*optimizer);
    ASSERT_EQ(master.dtype(), DType::float32);
    for (int64_t i = 0; i < master.numel(); ++i)
      ASSERT_EQ(unit.values.data<bfloat16>()[i].bits, bfloat16(master.data<float>()[i]).bits);
  }
}

// The part [from, to) of a unit, in memory of its own, with the unit's slots as seen from there.
FlatUnit shard_of(const FlatUnit& unit, int64_t from, int64_t to) {
  FlatUnit shard = unit;
  shard.values = unit.values.narrow(0, from, to - from).clone();
  shard.grads = unit.grads.narrow(0, from, to - from).clone();
  for (Slot& slot : shard.slots) slot.begin -= from;
  return shard;
}

TEST(Optimizer, AShardGetsTheBitsOfTheWhole) {
  for (const char* name : kNames)
    for (const DType dtype : {DType::float64, DType::float32, DType::bfloat16}) {
      const FlatUnit unit = make_unit("u", {7, 1003, 20011, 5}, dtype, dtype, make_arena());
      fill_normal(unit, unit.values, 3, 1.0);
      fill_normal(unit, unit.grads, 4, 1.0);
      const int64_t n = unit.values.numel();
      const std::vector<int64_t> cuts{0, 3, 500, 501, 9999, 10007, n - 1, n};
      std::vector<FlatUnit> shards;
      for (size_t i = 0; i + 1 < cuts.size(); ++i) shards.push_back(shard_of(unit, cuts[i], cuts[i + 1]));
      const auto whole = make_optimizer(kind_of(name), {unit}, kOptions),
                 parts = make_optimizer(kind_of(name), shards, kOptions);
      for (int t = 0; t < 3; ++t) {
        whole->step(0.01, 0.7);
        parts->step(0.01, 0.7);
      }
      const size_t kinds = whole->state().size();
      for (size_t i = 0; i < shards.size(); ++i) {
        const int64_t length = cuts[i + 1] - cuts[i];
        EXPECT_TRUE(same_bits(shards[i].values, unit.values.narrow(0, cuts[i], length))) << name << " shard " << i;
        for (size_t k = 0; k < kinds; ++k)
          EXPECT_TRUE(
              same_bits(parts->state()[i * kinds + k].tensor, whole->state()[k].tensor.narrow(0, cuts[i], length)));
      }
    }
}

TEST(Optimizer, ThreadsDoNotChangeABitAndGapsStayZero) {
  const int before = cpu::threads();
  for (const char* name : kNames) {
    std::vector<FlatUnit> results;
    for (const int threads : {1, 2, 3}) {
      cpu::set_threads(threads);
      const FlatUnit unit = make_unit("u", {50001, 3, 100, 40000}, DType::float32, DType::bfloat16, make_arena());
      fill_normal(unit, unit.values, 5, 1.0);
      fill_normal(unit, unit.grads, 6, 1.0);
      const auto optimizer = make_optimizer(kind_of(name), {unit}, kOptions);
      for (int t = 0; t < 3; ++t) optimizer->step(0.01, 1.0);
      EXPECT_TRUE(same_bits(unit.values, results.empty() ? unit.values : results[0].values)) << name << threads;
      for (size_t s = 0; s < unit.slots.size(); ++s) {
        const int64_t end = s + 1 < unit.slots.size() ? unit.slots[s + 1].begin : unit.values.numel();
        for (int64_t i = unit.slots[s].end(); i < end; ++i) EXPECT_EQ(unit.values.data<float>()[i], 0.0f);
      }
      results.push_back(unit);
    }
  }
  cpu::set_threads(before);
}

TEST(Optimizer, StateIsNamedCountedAndResumes) {
  const ArenaPtr arena = make_arena();
  const FlatUnit unit = make_unit("blocks.0", {100, 20}, DType::bfloat16, DType::float32, arena);
  fill_normal(unit, unit.values, 1, 1.0);
  fill_normal(unit, unit.grads, 2, 1.0);
  const uint64_t version = unit.values.storage()->version;
  const auto first = make_optimizer(OptimizerKind::adamw, {unit}, kOptions);
  EXPECT_EQ(arena->usage(Category::optimizer).live, 3 * 4 * unit.values.numel());
  first->step(0.01, 1.0);
  EXPECT_EQ(unit.values.storage()->version, version + 1);
  ASSERT_EQ(first->state().size(), 3u);
  EXPECT_EQ(first->state()[0].name, "blocks.0.m");
  EXPECT_EQ(first->state()[1].name, "blocks.0.v");
  EXPECT_EQ(first->state()[2].name, "blocks.0.master");

  FlatUnit copy = unit;
  copy.values = unit.values.clone();
  const auto second = make_optimizer(OptimizerKind::adamw, {copy}, kOptions);
  for (size_t i = 0; i < 3; ++i) {
    Tensor target = second->state()[i].tensor;
    target.copy_from(first->state()[i].tensor);
  }
  second->set_steps(first->steps());
  first->step(0.01, 1.0);
  second->step(0.01, 1.0);
  EXPECT_TRUE(same_bits(unit.values, copy.values));
  EXPECT_TRUE(same_bits(first->state()[2].tensor, second->state()[2].tensor));
}

TEST(Optimizer, RefusesWhatDoesNotFit) {
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

}  // namespace
}  // namespace tessera
