// The ops of a mixture of experts on a GPU beside the CPU's: choices, places and counts of any routing, rows there and
// back, products of any number of rows.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "tensor/cuda/graph.h"
#include "tensor/ops/experts/route.h"
#include "tensor/ops/experts/rows.h"
#include "tests/support/draw.h"
#include "tests/support/gpu.h"
#include "tests/support/tensors.h"

namespace tessera {
namespace {

using test::Draw;
using test::drawn;
using test::same_bits;
using ExpertsGpu = test::OnGpu;

constexpr DType kFloating[] = {DType::float64, DType::float32, DType::bfloat16};

// The largest difference, in units of the largest element.
double apart(const Tensor& a, const Tensor& b) {
  const std::vector<double> x = a.to(DType::float64).to_vector<double>(), y = b.to(DType::float64).to_vector<double>();
  EXPECT_EQ(x.size(), y.size());
  double most = 0, scale = 1e-30;
  for (size_t i = 0; i < y.size(); ++i) {
    most = std::max(most, std::abs(x[i] - y[i]));
    scale = std::max(scale, std::abs(y[i]));
  }
  return most / scale;
}
double bound(DType dtype) { return dtype == DType::float64 ? 1e-13 : dtype == DType::float32 ? 1e-5 : 8e-3; }

struct Routing {
  Tensor logits;
  RouteOptions options = {};
};

// Now and then all logits are of few values, so that many are equal; long sequences, many experts, choices that were
// made elsewhere. `crowded`: choices of other logits, of which some are dropped.
Routing draw_routing(Draw& d, DType dtype, bool crowded) {
  const int64_t experts = crowded ? 5 : d.of<int64_t>({1, 2, 5, 8, 33, 64, 300, 2000}), sequences = d.between(1, 4),
                length = crowded        ? 40
                         : experts > 64 ? d.between(1, 5)
                                        : d.of<int64_t>({1, 3, 40, 300}),
                n = sequences * length;
  const double range = d.of({3.0, 0.01, 30.0});
  Routing r{.logits = drawn({n, experts}, dtype, "logits" + std::to_string(d.between(0, 1000)), -range, range)};
  if (d.between(0, 2) == 0)
    r.logits = Tensor::of<double>(
                   [&] {
                     std::vector<double> few(static_cast<size_t>(n * experts));
                     for (double& x : few) x = static_cast<double>(d.between(0, 2));
                     return few;
                   }(),
                   {n, experts}, make_arena())
                   .to(dtype);
  r.options = {.per_token = d.between(1, std::min<int64_t>(experts, 6)),
               .softmax_first = d.between(0, 1) == 1,
               .sequences = sequences,
               .capacity = crowded ? 1 : d.of<int64_t>({0, 0, 1, 7, 100}),
               .balance = d.of({0.0, 0.3}),
               .z = d.of({0.0, 0.1}),
               .tokens = d.of<int64_t>({0, 2 * length})};
  if (crowded || d.between(0, 2) == 0) {
    const Tensor moved = drawn({n, experts}, dtype, "moved", -range, range);
    r.options.given = route(crowded || d.between(0, 1) == 0 ? moved : r.logits, r.options).chosen;
  }
  return r;
}

TEST_F(ExpertsGpu, RoutingIsThatOfTheCpu) {
  int64_t dropped = 0, elsewhere = 0;
  for (uint64_t trial = 0; trial < test::plans(40); ++trial)
    for (const DType dtype : kFloating) {
      Draw d("routing", trial);
      const Routing r = draw_routing(d, dtype, trial == 0);
      SCOPED_TRACE(std::to_string(trial) + " " + r.logits.describe());
      const Routed here = route(r.logits, r.options), there = route(r.logits.to(arena), r.options);
      EXPECT_TRUE(same_bits(there.chosen, here.chosen) && same_bits(there.place, here.place));
      EXPECT_TRUE(same_bits(there.of_sequences, here.of_sequences));
      EXPECT_EQ(there.counts, here.counts);
      EXPECT_EQ(std::pair(there.rows, there.dropped), std::pair(here.rows, here.dropped));
      EXPECT_EQ(std::pair(there.elsewhere, there.margin), std::pair(here.elsewhere, here.margin));
      if (dtype == DType::float64)  // whose exponentials are the C library's and CUDA's
        EXPECT_LT(test::farthest(there.weights, here.weights), 1e-14);
      else
        EXPECT_TRUE(same_bits(there.weights, here.weights));
      dropped += here.dropped;
      elsewhere += here.elsewhere;

      const Tensor dweights = drawn(here.weights.shape(), here.weights.dtype(), "dweights");
      const Tensor expected = route_backward(dweights, r.logits, here, r.options),
                   found = route_backward(dweights.to(arena), r.logits.to(arena), there, r.options);
      EXPECT_LT(apart(found, expected), bound(dtype));
    }
  EXPECT_TRUE(dropped > 0 && elsewhere > 0);
}

// A logit that is no number leaves every choice an expert.
TEST_F(ExpertsGpu, ChoicesAreExpertsWhateverTheLogits) {
  constexpr float kNan = std::numeric_limits<float>::quiet_NaN(), kInfinity = std::numeric_limits<float>::infinity();
  const std::vector<float> values = {kNan, 1,    2,    3, 1, kNan,       3, 2, kNan,      kNan,      kNan,       kNan,
                                     1,    kNan, kNan, 0, 0, -kInfinity, 0, 0, kInfinity, kInfinity, -kInfinity, 5};
  const Tensor logits = Tensor::of<float>(values, {6, 4}, make_arena());
  for (int64_t k = 1; k <= 4; ++k) {
    const Routed here = route(logits, {.per_token = k}), there = route(logits.to(arena), {.per_token = k});
    EXPECT_TRUE(same_bits(there.chosen, here.chosen) && same_bits(there.place, here.place));
    EXPECT_EQ(there.counts, here.counts);
  }
}

// The host waits for the number of each expert's rows, and for nothing else.
TEST_F(ExpertsGpu, TheHostWaitsOncePerLayer) {
  const Tensor logits = drawn({64, 8}, DType::float32, "logits").to(arena),
               x = drawn({64, 16}, DType::float32, "x").to(arena), w = drawn({16, 16}, DType::float32, "w").to(arena);
  const RouteOptions o{.per_token = 2, .sequences = 2, .capacity = 9, .balance = 1, .z = 1};
  const auto waits = [&]() -> int64_t {
    if constexpr (kWithCuda) return cuda::synchronizations(*arena);
    return 0;
  };
  const int64_t before = waits();
  const Routed routed = route(logits, o);
  EXPECT_EQ(waits() - before, 1);
  const Tensor rows = linear_rows(dispatch_rows(x, routed), w), y = combine_rows(rows, routed.weights, routed);
  const CombineGrads d = combine_rows_backward(y, rows, routed.weights, routed);
  route_backward(d.weights, logits, routed, o);
  Tensor dw = w.clone();
  linear_rows_weight_grad(dw, d.rows, rows);
  dispatch_rows_backward(linear_rows_input_grad(d.rows, w), routed);
  EXPECT_EQ(waits() - before, 1);
}

// Rows with and without whole parts of 16 bytes, of a warp and of a block; dropped choices.
TEST_F(ExpertsGpu, RowsTravelAsOnTheCpu) {
  for (uint64_t trial = 0; trial < test::plans(20); ++trial)
    for (const DType dtype : kFloating) {
      Draw d("rows", trial);
      const Routing r = draw_routing(d, dtype, trial == 0);
      const int64_t n = r.logits.dim(0), c = d.of<int64_t>({1, 5, 8, 64, 300, 1100, 2304});
      SCOPED_TRACE(std::to_string(trial) + " " + r.logits.describe() + " " + std::to_string(c));
      const Routed here = route(r.logits, r.options);
      Routed there = here;
      there.place = here.place.to(arena);
      const Tensor x = drawn({n, c}, dtype, "x"), rows = dispatch_rows(x, here);
      EXPECT_TRUE(same_bits(dispatch_rows(x.to(arena), there), rows));
      EXPECT_TRUE(same_bits(dispatch_rows_backward(rows.to(arena), there), dispatch_rows_backward(rows, here)));
      const Tensor w = here.weights, w_there = w.to(arena);
      EXPECT_TRUE(same_bits(combine_rows(rows.to(arena), w_there, there), combine_rows(rows, w, here)));
      const CombineGrads expected = combine_rows_backward(x, rows, w, here),
                         found = combine_rows_backward(x.to(arena), rows.to(arena), w_there, there);
      EXPECT_TRUE(same_bits(found.rows, expected.rows));
      EXPECT_LT(apart(found.weights, expected.weights), dtype == DType::float64 ? 1e-13 : 1e-5);
    }
}

struct Sizes {
  int64_t m, k, n;
};

// bfloat16 is added in steps of sixteen: near, and the bits of the CPU elsewhere.
void expect_product(const Tensor& found, const Tensor& expected, DType dtype) {
  if (dtype != DType::bfloat16)
    EXPECT_TRUE(same_bits(found, expected));
  else
    EXPECT_LT(apart(found, expected), bound(expected.dtype()));
}

// Sizes of parts of tiles, of several, and of none; rows of any length, and such as begin anywhere.
TEST_F(ExpertsGpu, ProductsOfAnyNumberOfRows) {
  std::vector<Sizes> all = {{1, 1, 1},     {0, 5, 3},    {64, 64, 64},   {65, 63, 129}, {3, 200, 72},
                            {130, 96, 40}, {17, 8, 264}, {257, 24, 136}, {9, 300, 7}};
  for (uint64_t trial = 0; trial < test::plans(20); ++trial) {
    Draw d("products", trial);
    const int64_t unit = d.of<int64_t>({1, 8});
    all.push_back({d.between(0, 150), unit * d.between(1, 150 / unit), unit * d.between(1, 150 / unit)});
  }
  for (const auto& [m, k, n] : all)
    for (const DType dtype : kFloating) {
      SCOPED_TRACE(std::string(name_of(dtype)) + " " + Shape({m, k, n}).str());
      const Tensor x = drawn({m + 1, k}, dtype, "x").narrow(0, 1, m), w = drawn({n, k}, dtype, "w"),
                   dy = drawn({m, n}, dtype, "dy");
      const Tensor x_there = drawn({m + 1, k}, dtype, "x").to(arena).narrow(0, 1, m), w_there = w.to(arena),
                   dy_there = dy.to(arena);
      expect_product(linear_rows(x_there, w_there), linear_rows(x, w), dtype);
      expect_product(linear_rows_input_grad(dy_there, w_there), linear_rows_input_grad(dy, w), dtype);
      for (const DType to : {dtype, wide_of(dtype)}) {
        Tensor dw = Tensor::empty({n, k}, to, make_arena()), dw_there = Tensor::empty({n, k}, to, arena);
        dw_there.fill(std::numeric_limits<double>::quiet_NaN());
        linear_rows_weight_grad(dw, dy, x);
        linear_rows_weight_grad(dw_there, dy_there, x_there);
        expect_product(dw_there, dw, dtype);
        if (m > 0) continue;
        EXPECT_EQ(dw_there.to(DType::float64).to_vector<double>(), std::vector<double>(static_cast<size_t>(n * k)));
      }
      Tensor turned = Tensor::empty({k, n}, DType::float32, arena).transpose(0, 1),
             straight = w.make({n, k}, DType::float32);
      linear_rows_weight_grad(turned, dy_there, x_there);
      linear_rows_weight_grad(straight, dy, x);
      expect_product(turned, straight, dtype);
    }
}

// Whatever rows are beside it, and how many: also where other tiles are taken for more of them.
TEST_F(ExpertsGpu, ARowHasItsOwnBits) {
  for (const DType dtype : kFloating) {
    const int64_t m = dtype == DType::float64 ? 150 : 2100, k = 24, n = 1040;
    const Tensor x = drawn({m, k}, dtype, "x").to(arena), w = drawn({n, k}, dtype, "w").to(arena),
                 dy = drawn({m, k}, dtype, "dy").to(arena), back = drawn({k, n}, dtype, "back").to(arena);
    const Tensor y = linear_rows(x, w), dx = linear_rows_input_grad(dy, back);
    for (const auto& [first, count] : {std::pair<int64_t, int64_t>{0, 1}, {m - 1, 1}, {13, 50}, {61, 70}, {20, 0}}) {
      SCOPED_TRACE(std::string(name_of(dtype)) + " " + std::to_string(first));
      EXPECT_TRUE(same_bits(linear_rows(x.narrow(0, first, count), w), y.narrow(0, first, count)));
      EXPECT_TRUE(same_bits(linear_rows_input_grad(dy.narrow(0, first, count), back), dx.narrow(0, first, count)));
    }
    EXPECT_TRUE(same_bits(linear_rows(x, w), y));
  }
}

}  // namespace
}  // namespace tessera
