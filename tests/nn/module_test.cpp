// Modules: names, units, first values, ties, wraps; the layers that GPT-2 does not use; the loss for numbers.

#include <gtest/gtest.h>

#include "nn/layers.h"

namespace tessera {
namespace {

// Two linear layers, the second a unit of its own.
struct Pair : Module {
  Pair()
      : first(child<Linear>("first", 3, 5, Linear::Options{})),
        second(child<Linear>("second", 5, 3, Linear::Options{.bias = false})) {
    second.make_unit();
  }
  Var forward(const Var& x) override { return second(first(x)); }
  Linear &first, &second;
};

TEST(Module, NamesAndUnitsFollowTheTree) {
  Pair model;
  std::vector<std::string> names;
  for (const Parameter* p : model.parameters()) names.push_back(p->name);
  EXPECT_EQ(names, (std::vector<std::string>{"first.weight", "first.bias", "second.weight"}));
  EXPECT_EQ(model.parameter_count(), 15 + 5 + 15);
  EXPECT_EQ(model.second.full_name(), "second");
  const ArenaPtr arena = make_arena();
  const auto& units = model.materialize(3, arena, DType::float32, DType::float64);
  ASSERT_EQ(units.size(), 2U);
  EXPECT_EQ(units[0].name, "model");
  EXPECT_EQ(units[1].name, "second");
  ASSERT_EQ(units[0].slots.size(), 2U);
  EXPECT_TRUE(units[0].slots[0].parameter->decays);   // a matrix
  EXPECT_FALSE(units[0].slots[1].parameter->decays);  // a bias
  EXPECT_EQ(units[0].slots[1].begin % 16, 0);
  EXPECT_EQ(units[0].grads.dtype(), DType::float64);
  EXPECT_EQ(model.first.weight.value().storage(), units[0].values.storage());
}

TEST(Module, AnElementsFirstValueDependsOnSeedNameAndIndexAlone) {
  const ArenaPtr arena = make_arena();
  Pair model, other;
  model.materialize(3, arena, DType::float64, DType::float64);
  const Tensor w = model.second.weight.value();
  for (const int64_t i : {0, 7, 14})
    EXPECT_EQ(w.data<double>()[i], 0.02 * Philox::named(3, "second.weight").normal(static_cast<uint64_t>(i)));
  EXPECT_EQ(model.first.bias->value().to_vector<double>(), std::vector<double>(5, 0));
  other.materialize(4, arena, DType::float64, DType::float64);
  EXPECT_NE(other.second.weight.value().to_vector<double>(), w.to_vector<double>());
}

// Two micro-batches of a weight that is used twice: (a0 + b0) + (a1 + b1), which in float32 is not ((a0 + b0) + a1) +
// b1.
TEST(Module, TheUsesOfATiedWeightAreSummedPerBackward) {
  const ArenaPtr arena = make_arena();
  Pair model;
  model.materialize(3, arena, DType::float32, DType::float32);
  const auto times = [&](float value) {  // a use whose gradient is `value` everywhere
    return sum(model.first.weight * Var(Tensor::of<float>(std::vector<float>(15, value), {5, 3}, arena)));
  };
  const float a0 = 1, b0 = 3e-8F, a1 = 5e-8F, b1 = -1;
  int hooks = 0;
  model.first.weight.on_grad([&] { ++hooks; });
  for (int step = 0; step < 2; ++step) {
    model.clear_gradients();
    backward(times(b0) + times(a0));  // from the newest to the oldest
    EXPECT_EQ(model.first.weight.grad().to_vector<float>(), std::vector<float>(15, a0 + b0));
    backward(times(b1) + times(a1));
    model.zero_missing_gradients();
    EXPECT_EQ(model.first.weight.grad().to_vector<float>(), std::vector<float>(15, (a0 + b0) + (a1 + b1)));
    EXPECT_NE((a0 + b0) + (a1 + b1), ((a0 + b0) + a1) + b1);
    EXPECT_EQ(model.second.weight.grad().to_vector<float>(), std::vector<float>(15, 0));  // nobody brought one
    EXPECT_EQ(hooks, 2 * (step + 1));  // once per backward, when both uses have come
  }
}

TEST(Module, WrapsSeeTheCallFromOutsideIn) {
  const ArenaPtr arena = make_arena();
  Pair model;
  model.materialize(3, arena, DType::float64, DType::float64);
  const Var x(Tensor::of<double>(std::array{1.0, 2.0, 3.0}, {1, 3}, arena));
  const std::vector<double> plain = model(x).value().to_vector<double>();
  std::string order;
  model.second.wrap([&](const Module::Inner& inner, const Var& in) {
    order += "a";
    return scale(inner(in), 2);
  });
  model.second.wrap([&](const Module::Inner& inner, const Var& in) {
    order += "b";
    return inner(scale(in, 3));
  });
  const std::vector<double> wrapped = model(x).value().to_vector<double>();
  EXPECT_EQ(order, "ba");
  for (size_t i = 0; i < plain.size(); ++i) EXPECT_NEAR(wrapped[i], 6 * plain[i], 1e-15);
}

TEST(Module, RefusesWhatCannotBe) {
  EXPECT_THROW(Linear(0, 3, {}), Error);
  EXPECT_THROW(Attention(10, {.heads = 3}), Error);
  struct NoForward : Module {
  } module;
  EXPECT_THROW(module(Var()), Error);
}

TEST(Layers, RmsNormScalesToUnitMeanSquare) {
  const ArenaPtr arena = make_arena();
  RMSNorm norm(4);
  norm.materialize(1, arena, DType::float64, DType::float64);
  const Var x(Tensor::of<double>(std::array{1.0, -2.0, 3.0, 4.0}, {1, 4}, arena), true);
  const std::vector<double> y = norm(x).value().to_vector<double>();
  const double rms = std::sqrt(30.0 / 4 + 1e-5);
  for (size_t i = 0; i < 4; ++i) EXPECT_NEAR(y[i], x.value().to_vector<double>()[i] / rms, 1e-12);
  const auto [sum_of_both, normed] = norm.add(x, scale(x, 1));
  EXPECT_EQ(sum_of_both.value().to_vector<double>(), (std::vector<double>{2, -4, 6, 8}));
  EXPECT_NEAR(normed.value().to_vector<double>()[3], 8 / std::sqrt(30.0 + 1e-5), 1e-12);
}

TEST(Losses, MeanSquaredErrorAndItsGradient) {
  const ArenaPtr arena = make_arena();
  const Var p(Tensor::of<double>(std::array{1.0, 2.0, 5.0, 0.0}, {2, 2}, arena), true);
  const Var t(Tensor::of<double>(std::array{0.0, 2.0, 3.0, 4.0}, {2, 2}, arena));
  const Var loss = mean_squared_error(p, t);
  EXPECT_EQ(loss.value().item<double>(), (1.0 + 0 + 4 + 16) / 4);
  backward(loss);
  EXPECT_EQ(p.grad().to_vector<double>(), (std::vector<double>{0.5, 0, 1, -2}));
  EXPECT_THROW(mean_squared_error(p, sum(t)), Error);
}

}  // namespace
}  // namespace tessera
