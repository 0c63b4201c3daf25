// Ops of a mixture of experts where the op table does not reach: bits of rows whatever is beside them, the losses of
// the router, what does not fit.
#include "autograd/experts.h"

#include <gtest/gtest.h>

#include <cmath>

#include "tensor/ops/experts/rows.h"
#include "tests/support/tensors.h"

namespace tessera {
namespace {

// Whatever rows are beside it, and how many.
TEST(ExpertOps, ARowHasItsOwnBits) {
  const ArenaPtr arena = make_arena();
  for (const DType dtype : {DType::float64, DType::float32, DType::bfloat16}) {
    const Tensor x = test::drawn({97, 70}, dtype, "x"), w = test::drawn({45, 70}, dtype, "w"),
                 dy = test::drawn({97, 45}, dtype, "dy");
    const Tensor y = linear_rows(x, w), dx = linear_rows_input_grad(dy, w);
    for (const auto& [first, count] : {std::pair<int64_t, int64_t>{0, 1}, {96, 1}, {13, 50}, {40, 7}, {20, 0}}) {
      EXPECT_TRUE(test::same_bits(linear_rows(x.narrow(0, first, count), w), y.narrow(0, first, count)));
      EXPECT_TRUE(test::same_bits(linear_rows_input_grad(dy.narrow(0, first, count), w), dx.narrow(0, first, count)));
    }
    Tensor dw = test::drawn({45, 70}, wide_of(dtype), "before");
    linear_rows_weight_grad(dw, dy.narrow(0, 5, 0), x.narrow(0, 5, 0));
    EXPECT_EQ(dw.to(DType::float64).to_vector<double>(), std::vector<double>(45 * 70, 0.0));  // of no rows
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
  EXPECT_THROW(linear_rows(logits, test::drawn({3, 2}, DType::float32, "w")), Error);
}

}  // namespace
}  // namespace tessera
