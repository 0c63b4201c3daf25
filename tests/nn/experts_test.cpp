// Mixture of experts: compared with PyTorch, over micro-batches, at capacity, and its statistics.
#include "nn/experts/experts.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <iterator>
#include <limits>
#include <map>
#include <span>
#include <string>
#include <tuple>
#include <vector>

#include "tests/support/errors.h"
#include "tests/support/python.h"
#include "tests/support/tensors.h"

namespace tessera {
namespace {

struct Passed {
  Tensor y, dx;
  std::vector<Tensor> gradients;  // router, each expert, shared layer
};

MlpOptions mlp_options(bool gated) { return {.activation = gated ? kSwiglu : ActivationOptions()}; }

// In the oracle's order: parameters outside of experts come first in a module.
std::vector<Parameter*> in_order(MixtureOfExperts& m) {
  std::vector<Parameter*> all = m.parameters();
  std::ranges::stable_sort(all, {}, [](const Parameter* p) {
    return p->name.starts_with("router") ? 0 : p->is_expert ? 1 : 2;
  });
  return all;
}

Passed pass(MixtureOfExperts& m, const Tensor& x, const Tensor& dy, const StepInfo& at) {
  m.set_step(at);
  m.clear_gradients();
  const Var in(x, true), y = m(in);
  backward(y, {.seed = dy});
  Passed out{y.value(), in.grad(), {}};
  for (const Parameter* p : in_order(m)) out.gradients.push_back(p->var.grad().clone());
  return out;
}

TEST(Experts, MatchPyTorch) {
  if (const std::string why = test::missing("torch"); !why.empty()) GTEST_SKIP() << why;
  const int64_t b = 3, t = 10, c = 12, hidden = 20;
  std::vector<float> inputs;
  std::vector<Tensor> ours;
  std::string layers;
  const auto add = [&](const Tensor& all) { std::ranges::copy(all.to_vector<float>(), std::back_inserter(inputs)); };
  for (const auto& [gated, softmax, shared] : {std::tuple{false, RouterSoftmax::chosen, 0},
                                               {true, RouterSoftmax::chosen, 1},
                                               {true, RouterSoftmax::all, 0},
                                               {false, RouterSoftmax::all, 2}}) {
    const ExpertConfig config{
        .count = 5, .per_token = 2, .shared = shared, .softmax = softmax, .balance_loss = 0.4, .z_loss = 0.2};
    MixtureOfExperts m(c, {.hidden = hidden, .mlp = mlp_options(gated), .experts = config});
    m.materialize(3, make_arena(), DType::float32, DType::float32);
    const Tensor x = test::random_tensor({b, t, c}, DType::float32, "x"),
                 dy = test::random_tensor({b, t, c}, DType::float32, "dy");
    add(x);
    add(dy);
    for (const Parameter* p : in_order(m)) {
      Tensor(p->var.value()).copy_from(test::random_tensor(p->full_shape, DType::float32, p->name, -0.7, 0.7));
      add(p->var.value());
    }
    layers += fmt::format(" {},{},{},{},{},{},{:d},{:d},{},{},{}", b, t, c, config.count, config.per_token, hidden,
                          gated, softmax == RouterSoftmax::all, shared, config.balance_loss, config.z_loss);
    const Passed passed = pass(m, x, dy, {.training = true});
    ours.insert(ours.end(), {passed.y, passed.dx});
    ours.insert(ours.end(), passed.gradients.begin(), passed.gradients.end());
  }
  const test::Exchange exchange;
  exchange.write("in.bin", std::span<const float>(inputs));
  exchange.run(TESSERA_SOURCE_DIR "/tests/compare/experts_pytorch.py", layers);
  const std::vector<double> theirs = exchange.read<double>("out.bin");
  std::span<const double> left(theirs);
  for (size_t i = 0; i < ours.size(); ++i) {
    const std::vector<double> own = test::host_values(ours[i]);
    ASSERT_LE(own.size(), left.size());
    EXPECT_LE(test::distance(own, left.first(own.size())), 1e-5) << i;
    left = left.subspan(own.size());
  }
  EXPECT_TRUE(left.empty());
}

// Router losses are means over a step's sequences, and the capacity applies to each sequence.
TEST(Experts, GradientsAccumulateOverMicrobatches) {
  const int64_t c = 8;
  for (const double capacity : {0.0, 1.0}) {
    MixtureOfExperts m(
        c, {.hidden = 12, .experts = {.count = 4, .capacity = capacity, .balance_loss = 0.5, .z_loss = 0.1}});
    m.materialize(1, make_arena(), DType::float64, DType::float64);
    const Tensor x = test::random_tensor({4, 6, c}, DType::float64, "x"),
                 dy = test::random_tensor({4, 6, c}, DType::float64, "dy");
    const StepInfo at{.sequences_total = 4, .training = true};
    const Passed full = pass(m, x, dy, at);
    std::vector<Tensor> sums;
    for (const auto& [first, count] : {std::pair{0, 3}, {3, 1}}) {
      const Passed part = pass(m, x.narrow(0, first, count).clone(), dy.narrow(0, first, count).clone(), at);
      EXPECT_TRUE(test::bitwise_equal(part.dx, full.dx.narrow(0, first, count)));
      if (first == 0) sums = part.gradients;
      for (size_t i = 0; first > 0 && i < sums.size(); ++i) add_(sums[i], part.gradients[i]);
    }
    ASSERT_EQ(sums.size(), full.gradients.size());
    for (size_t i = 0; i < sums.size(); ++i) EXPECT_LE(test::distance(full.gradients[i], sums[i]), 1e-13) << i;
  }
}

// All tokens choose the first expert: it accepts its capacity of each sequence, and dropped tokens contribute nothing.
TEST(Experts, DropTokensBeyondCapacity) {
  MixtureOfExperts m(4, {.hidden = 4, .experts = {.count = 4, .per_token = 1, .capacity = 1.4}});
  m.materialize(1, make_arena(), DType::float32, DType::float32);
  Tensor router = in_order(m)[0]->var.value();
  router.fill(0);
  const Tensor x = test::random_tensor({2, 8, 4}, DType::float32, "x");
  const Passed passed = pass(m, x, x, {.training = true});
  for (int64_t token = 0; token < 16; ++token) {
    const bool within_capacity = token % 8 < 3;  // ceil(1.4 * 8 / 4)
    const std::vector<float> y = passed.y.flat_rows().select(0, token).to_vector<float>();
    EXPECT_EQ(std::ranges::count(y, 0) == 4, !within_capacity) << token;
  }
  const MixtureOfExperts::Load load = m.take_load();
  EXPECT_EQ(load.rows, (std::vector<int64_t>{6, 0, 0, 0}));
  EXPECT_EQ(load.dropped, 10);
  EXPECT_EQ(m.take_load().dropped, 0);
  m.set_step({});  // not training
  const NoGrad no_grad;
  for (const double v : test::host_values(m(Var(x)).value())) EXPECT_NE(v, 0);
  EXPECT_EQ(m.take_load().rows, (std::vector<int64_t>{0, 0, 0, 0}));
}

// Separate GEMMs are used if parameters are gathered per unit.
TEST(Experts, SeparateGemmsAreBitwiseEqualToGroupedGemm) {
  for (const bool gated : {false, true}) {
    std::vector<Passed> passed;
    for (const bool apart : {false, true}) {
      MixtureOfExperts m(8, {.hidden = 12, .mlp = mlp_options(gated), .experts = {.count = 5, .per_token = 2}});
      m.materialize(1, make_arena(), DType::float32, DType::float32);
      if (apart && gated)
        for (GatedMlp* expert : m.all<GatedMlp>()) expert->disable_fusion();
      else if (apart)
        for (Mlp* expert : m.all<Mlp>()) expert->disable_fusion();
      const Tensor x = test::random_tensor({2, 6, 8}, DType::float32, "x");
      passed.push_back(pass(m, x, x, {.training = true}));
    }
    EXPECT_TRUE(test::bitwise_equal({passed[0].y, passed[0].dx}, {passed[1].y, passed[1].dx}));
    EXPECT_TRUE(test::bitwise_equal(passed[0].gradients, passed[1].gradients));
  }
}

TEST(Experts, RejectLayersWithCustomMatmul) {
  MixtureOfExperts m(4, {.hidden = 4, .experts = {.count = 2}});
  m.materialize(1, make_arena(), DType::float32, DType::float32);
  m.all<Mlp>()[1]->down.hooks.matmul = [](const Var& x, const Var&, const Var&, PackedWeights*) { return x; };
  EXPECT_THROW(m(Var(test::random_tensor({1, 5, 4}, DType::float32, "x"))), Error);
}

TEST(Experts, AreSeparateUnits) {
  MixtureOfExperts m(4, {.hidden = 6, .mlp = mlp_options(true), .experts = {.count = 3, .shared = 2}});
  const auto names = [&] {
    std::string all;
    for (const Module::Unit& unit : m.layout()) all += unit.name + " ";
    return all;
  };
  EXPECT_EQ(names(), "model experts.0 experts.1 experts.2 ");
  EXPECT_EQ(m.idle_elements(), 3 * 4 * 6);
  m.set_local_experts(1, 1, {});
  EXPECT_EQ(names(), "model experts.1 ");
}

// With non-finite logits a router still chooses valid experts.
TEST(Experts, NonFiniteInputsReachLoss) {
  MixtureOfExperts m(4, {.hidden = 4, .experts = {.count = 4, .per_token = 3}});
  m.materialize(1, make_arena(), DType::float32, DType::float32);
  Tensor x = test::random_tensor({1, 5, 4}, DType::float32, "x");
  x.fill(std::numeric_limits<double>::quiet_NaN());
  EXPECT_TRUE(std::isnan(m(Var(x)).value().to_vector<float>()[0]));
}

TEST(Experts, RejectInvalidOptions) {
  const auto field = [](const ExpertConfig& config) {
    return error_message([&] { MixtureOfExperts(4, {.hidden = 4, .experts = config}); });
  };
  EXPECT_TRUE(has(field({.count = 4, .per_token = 5}), "`experts_per_token`"));
  EXPECT_TRUE(has(field({.count = 4, .per_token = 0}), "`experts_per_token`"));
  EXPECT_TRUE(has(field({.count = 4, .shared = -1}), "`shared_experts`"));
  EXPECT_TRUE(has(field({.count = 4, .capacity = -1}), "`expert_capacity`"));
}

}  // namespace
}  // namespace tessera
