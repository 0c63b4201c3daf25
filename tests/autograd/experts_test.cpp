// Ops of a mixture of experts where the op table does not reach: bits of rows whatever is beside them, the losses of
// the router, what does not fit.

#include "autograd/experts/ops.h"
#include "autograd/ops.h"
#include "tests/support/tensors.h"

namespace tessera {
namespace {

// Whatever rows are beside it, and how many.
TEST(ExpertOps, ARowHasItsOwnBits) {
  const ArenaPtr arena = make_arena();
  for (const DType dtype : {DType::float64, DType::float32, DType::bfloat16}) {
    const Tensor x = test::drawn({97, 70}, dtype, "x"), w = test::drawn({45, 70}, dtype, "w"),
                 dy = test::drawn({97, 45}, dtype, "dy");
    const Tensor y = linear_rows(x, {{w, 97}}), dx = linear_rows_input_grad(dy, {{w, 97}});
    for (const auto& [first, count] : {std::pair<int64_t, int64_t>{0, 1}, {96, 1}, {13, 50}, {40, 7}, {20, 0}}) {
      const std::vector<RowsGroup> one{{w, count}};
      EXPECT_TRUE(test::same_bits(linear_rows(x.narrow(0, first, count), one), y.narrow(0, first, count)));
      EXPECT_TRUE(test::same_bits(linear_rows_input_grad(dy.narrow(0, first, count), one), dx.narrow(0, first, count)));
    }
    const Tensor dw = test::drawn({45, 70}, wide_of(dtype), "before");
    linear_rows_weight_grads({{dw, 0}}, dy.narrow(0, 5, 0), x.narrow(0, 5, 0));
    EXPECT_EQ(dw.to(DType::float64).to_vector<double>(), std::vector<double>(45 * 70, 0.0));  // the sum over no rows
  }
}

// Values and gradients of two passes over a weight that is trained, one that is not, and one that is made of another;
// rows of two sources.
struct Passes {
  std::vector<Tensor> found;
  int hooks = 0;
};
enum class How : uint8_t { at_once, later, one_by_one };

Passes two_passes(DType dtype, How how) {
  const std::vector<int64_t> counts{3, 0, 5, 1, 4, 0};
  const auto weight = [&](const std::string& name) { return test::drawn({7, 20}, dtype, name); };
  Var trained(weight("a"), true), below(weight("c"), true);
  Passes out;
  trained.on_grad([&] { ++out.hooks; });
  for (const char* const pass : {"first", "second"}) {
    const Var x(test::drawn({13, 20}, dtype, pass), true);
    const std::vector<Var> w{trained, Var(weight("b")), scale(below, 0.5)};
    Var y;
    if (how == How::one_by_one) {  // backward goes from the newest to the oldest
      std::vector<Var> parts = split_rows(x, counts);
      for (const size_t first : {size_t{3}, size_t{0}})
        for (size_t i = first; i < first + 3; ++i) parts[i] = linear_rows(parts[i], {w[i - first]}, {counts[i]});
      y = join_rows(parts);
    } else {
      y = linear_rows(x, w, counts);
    }
    DeferredWeightGrads later;
    backward(y, {.seed = test::drawn({13, 7}, dtype, "dy"), .defer = how == How::later ? &later : nullptr});
    if (how == How::later) {
      EXPECT_FALSE(later.empty());
      later.run();
    }
    out.found.insert(out.found.end(), {y.value(), x.grad()});
  }
  out.found.insert(out.found.end(), {trained.grad(), below.grad()});
  return out;
}

TEST(ExpertOps, AtOnceHaveTheBitsOfOneByOne) {
  for (const DType dtype : {DType::float64, DType::float32, DType::bfloat16}) {
    const Passes expected = two_passes(dtype, How::one_by_one);
    for (const How how : {How::at_once, How::later}) {
      const Passes passes = two_passes(dtype, how);
      EXPECT_EQ(passes.hooks, 2);
      for (size_t i = 0; i < passes.found.size(); ++i)
        EXPECT_TRUE(test::same_bits(passes.found[i], expected.found[i])) << name_of(dtype) << " " << i;
    }
  }
}

// The losses that route_backward() adds, worked out anew.
double router_losses(const std::vector<double>& logits, int64_t experts, const RouteOptions& o,
                     const std::vector<int32_t>& chosen) {
  const int64_t n = std::ssize(logits) / experts, length = n / o.sequences;
  double loss = 0;
  for (int64_t s = 0; s < o.sequences; ++s) {
    std::vector<double> choices(static_cast<size_t>(experts), 0), mean(choices);
    double z = 0;
    for (int64_t t = s * length; t < (s + 1) * length; ++t) {
      double sum = 0;
      for (int64_t e = 0; e < experts; ++e) sum += std::exp(logits[static_cast<size_t>(t * experts + e)]);
      z += std::log(sum) * std::log(sum) / static_cast<double>(length);
      for (int64_t e = 0; e < experts; ++e)
        mean[static_cast<size_t>(e)] +=
            std::exp(logits[static_cast<size_t>(t * experts + e)]) / sum / static_cast<double>(length);
      for (int64_t j = 0; j < o.per_token; ++j)
        choices[static_cast<size_t>(chosen[static_cast<size_t>(t * o.per_token + j)])] += 1;
    }
    for (int64_t e = 0; e < experts; ++e)
      loss += o.balance * static_cast<double>(experts) * choices[static_cast<size_t>(e)] /
              static_cast<double>(o.per_token * length) * mean[static_cast<size_t>(e)];
    loss += o.z * z;
  }
  return loss;
}

TEST(ExpertOps, TheRouterLearnsToBalance) {
  const int64_t experts = 5;
  const Tensor logits = test::drawn({12, experts}, DType::float64, "logits");
  const RouteOptions o{.per_token = 2, .sequences = 3, .capacity = 1, .balance = 0.7, .z = 0.3};
  const Routed routed = route(logits, o);
  EXPECT_GT(routed.dropped, 0);
  const Tensor zero = Tensor::zeros({12, 2}, DType::float64, make_arena());
  const std::vector<double> gradient = route_backward(zero, logits, routed, o).to_vector<double>();
  std::vector<double> values = logits.to_vector<double>();
  const std::vector<int32_t> chosen = routed.chosen.to_vector<int32_t>();
  for (size_t i = 0; i < values.size(); ++i) {
    const double before = values[i];
    double sides[2];
    for (const int side : {0, 1}) {
      values[i] = before + (side == 0 ? -1e-6 : 1e-6);
      sides[side] = router_losses(values, experts, o, chosen);
    }
    values[i] = before;
    EXPECT_NEAR(gradient[i], (sides[1] - sides[0]) / 2e-6, 1e-8);
  }
}

TEST(ExpertOps, SayWhatDoesNotFit) {
  const Tensor logits = test::drawn({6, 3}, DType::float32, "logits");
  EXPECT_THROW(route(logits, {.per_token = 4}), Error);
  EXPECT_THROW(route(logits, {.per_token = 1, .sequences = 4}), Error);
  const Tensor w = test::drawn({4, 3}, DType::float32, "w");
  EXPECT_THROW(linear_rows(logits, {{test::drawn({3, 2}, DType::float32, "w"), 6}}), Error);
  EXPECT_THROW(linear_rows(logits, {{w.to(DType::float64), 6}}), Error);
  EXPECT_THROW(linear_rows(logits, {{w, 5}}), Error);
  EXPECT_THROW(linear_rows(logits, std::vector<RowsGroup>()), Error);
  EXPECT_THROW(linear_rows(Var(logits), {Var(w), Var(w)}, {1, 2, 3}), Error);
}

}  // namespace
}  // namespace tessera
