// Ops of a mixture of experts: values against plain loops, gradients against finite differences, bits of rows whatever
// is beside them.
#include "autograd/experts.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <numeric>

#include "autograd/ops.h"
#include "tensor/ops/experts/rows.h"
#include "tests/autograd/op_checks.h"

namespace tessera {
namespace {

using test::Problem;
using test::Random;
using test::Values;

Problem draw_linear_rows(Random& random) {
  const int64_t m = random.between(1, 60), in = random.between(1, 300), out = random.between(1, 90);
  return {{{Shape{m, in}, -1, 1}, {Shape{out, in}, -1, 1}},
          [](const std::vector<Var>& v) { return linear_rows(v[0], v[1]); },
          [=](const Values& v) {
            std::vector<double> y;
            for (int64_t r = 0; r < m; ++r)
              for (int64_t o = 0; o < out; ++o)
                y.push_back(
                    std::inner_product(v[0].begin() + r * in, v[0].begin() + (r + 1) * in, v[1].begin() + o * in, 0.0));
            return y;
          }};
}

// Experts that multiply by 1, 2, 3, ...: from logits and x to the weighted sum.
Problem draw_mixture(Random& random) {
  const int64_t sequences = random.between(1, 3), length = random.between(1, 9), n = sequences * length,
                experts = random.between(1, 7), k = random.between(1, experts), c = random.one_of<int64_t>({1, 5, 300}),
                capacity = random.one_of<int64_t>({0, 0, 1, 3});
  const bool first = random.between(0, 1) == 1;
  const RouteOptions o{.per_token = k, .softmax_first = first, .sequences = sequences, .capacity = capacity};
  return {{{Shape{n, experts}}, {Shape{n, c}}},
          [o](const std::vector<Var>& v) {
            const RoutedVar r = route(v[0], o);
            std::vector<Var> parts = split_rows(dispatch_rows(v[1], r.routed), r.routed.counts);
            for (size_t e = 0; e < parts.size(); ++e) parts[e] = scale(parts[e], static_cast<double>(e) + 1);
            return combine_rows(join_rows(parts), r.weights, r.routed);
          },
          [=](const Values& v) {
            std::vector<double> y(static_cast<size_t>(n * c), 0);
            for (int64_t s = 0; s < sequences; ++s) {
              std::vector<std::vector<int64_t>> best;  // of each token, by falling logits
              for (int64_t t = 0; t < length; ++t) {
                std::vector<int64_t> order(static_cast<size_t>(experts));
                std::iota(order.begin(), order.end(), 0);
                const double* const l = v[0].data() + (s * length + t) * experts;
                std::stable_sort(order.begin(), order.end(), [l](int64_t a, int64_t b) { return l[a] > l[b]; });
                best.push_back(order);
              }
              std::vector<int64_t> taken(static_cast<size_t>(experts), 0);
              for (int64_t j = 0; j < k; ++j)
                for (int64_t t = 0; t < length; ++t) {
                  const std::vector<int64_t>& order = best[static_cast<size_t>(t)];
                  const double* const l = v[0].data() + (s * length + t) * experts;
                  double sum = 0;
                  for (int64_t i = 0; i < (first ? experts : k); ++i) sum += std::exp(l[order[static_cast<size_t>(i)]]);
                  const int64_t e = order[static_cast<size_t>(j)];
                  if (capacity > 0 && taken[static_cast<size_t>(e)]++ >= capacity) continue;
                  for (int64_t i = 0; i < c; ++i) {
                    const auto at = static_cast<size_t>((s * length + t) * c + i);
                    y[at] += std::exp(l[e]) / sum * static_cast<double>(e + 1) * v[1][at];
                  }
                }
            }
            return y;
          }};
}

const std::vector<test::OpRow> kTable{{"linear_rows", draw_linear_rows}, {"mixture", draw_mixture}};

TEST(ExpertOps, ComputeWhatPlainLoopsDo) {
  test::for_each_problem(kTable, [](const Problem& p, Random& random) {
    for (const DType dtype : {DType::float64, DType::float32, DType::bfloat16}) {
      const Values values = test::draw_values(p, dtype, random);
      const double bound = dtype == DType::float64 ? 1e-12 : dtype == DType::float32 ? 1e-5 : 1e-2;
      const auto operands = test::tensors_of(p, values, dtype, make_arena());
      EXPECT_LE(test::distance(test::doubles(test::run(p, operands).value), p.reference(values)), bound) << p.name;
    }
  });
}

TEST(ExpertOps, HaveTheGradientsOfFiniteDifferences) {
  test::for_each_problem(kTable, [](const Problem& p, Random& random) {
    Values values = test::draw_values(p, DType::float64, random);
    const test::Outcome found = test::run(p, test::tensors_of(p, values, DType::float64, make_arena()));
    for (size_t i = 0; i < values.size(); ++i) {
      const std::vector<double> gradient = test::doubles(found.grads[i]);
      for (int probe = 0; probe < 6; ++probe) {
        const auto at = static_cast<size_t>(random.between(0, std::ssize(values[i]) - 1));
        constexpr double kStep = 1e-6;
        double sides[2];
        for (const int side : {0, 1}) {
          Values moved = values;
          moved[i][at] += side == 0 ? -kStep : kStep;
          sides[side] = test::weighted(p.reference(moved));
        }
        EXPECT_NEAR(gradient[at], (sides[1] - sides[0]) / (2 * kStep), 1e-5 * (1 + std::abs(gradient[at]))) << p.name;
      }
    }
  });
}

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
