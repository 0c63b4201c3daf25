// The ops of a mixture of experts on a GPU beside the CPU's: choices, places and counts of any routing, rows there and
// back, products of any number of rows.

#include <limits>

#include "tensor/ops/elementwise.h"
#include "tensor/ops/experts/experts.h"
#include "tests/support/draw.h"
#include "tests/support/gpu.h"
#include "tests/support/tensors.h"

namespace tessera {
namespace {

using test::apart;
using test::Draw;
using test::drawn;
using test::same_bits;
using ExpertsGpu = test::OnGpu;

double bound(DType dtype) { return dtype == DType::float64 ? 1e-13 : dtype == DType::float32 ? 1e-5 : 8e-3; }

struct Routing {
  Tensor logits;
  RouteOptions options = {};
};

// Now and then all logits are of few values, so that many are equal; long sequences, many experts, choices that were
// made elsewhere. `crowded`: choices of other logits, of which some are dropped.
Routing draw_routing(Draw& d, DType dtype, bool crowded) {
  const int64_t experts = crowded ? 5 : d.of<int64_t>({1, 2, 5, 8, 33, 64, 300, 2000}), sequences = d.between(1, 4),
                length = crowded ? 40 : std::min<int64_t>(experts > 64 ? 5 : 300, d.of<int64_t>({1, 3, 40, 300})),
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
  r.options = {.per_token = d.between(1, crowded ? 2 : std::min<int64_t>(experts, 6)),
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
    for (const DType dtype : test::floating(arena)) {
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
    EXPECT_EQ(there.counts, here.counts);
    EXPECT_TRUE(same_bits(there.chosen, here.chosen) && same_bits(there.place, here.place));
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
  std::vector<RowsGroup> groups, gradients;
  for (const int64_t count : routed.counts) {
    groups.push_back({w, count});
    gradients.push_back({w.clone(), count});
  }
  const Tensor rows = linear_rows(dispatch_rows(x, routed), groups), y = combine_rows(rows, routed.weights, routed);
  const CombineGrads d = combine_rows_backward(y, rows, routed.weights, routed);
  route_backward(d.weights, logits, routed, o);
  linear_rows_weight_grads(gradients, d.rows, rows);
  dispatch_rows_backward(linear_rows_input_grad(d.rows, groups), routed);
  EXPECT_EQ(waits() - before, 1);
}

// Rows with and without whole parts of 16 bytes, of a warp and of a block; dropped choices.
TEST_F(ExpertsGpu, RowsTravelAsOnTheCpu) {
  for (uint64_t trial = 0; trial < test::plans(20); ++trial)
    for (const DType dtype : test::floating(arena)) {
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

// bfloat16 is added in steps of sixteen: near, and the bits of the CPU elsewhere.
void expect_product(const Tensor& found, const Tensor& expected, DType dtype) {
  if (dtype != DType::bfloat16)
    EXPECT_TRUE(same_bits(found, expected));
  else
    EXPECT_LT(apart(found, expected), bound(expected.dtype()));
}

struct Sizes {
  std::vector<int64_t> rows;  // numbers of rows, by group
  int64_t k, n;
};

// Groups of no rows, of one, of a part of a tile and of several; now and then more than a launch has.
Sizes draw_sizes(Draw& d) {
  const bool many = d.between(0, 5) == 0;
  const int64_t unit = d.of<int64_t>({1, 8}), most = (many ? 30 : 150) / unit;
  Sizes s{.rows = {}, .k = unit * d.between(1, most), .n = unit * d.between(1, most)};
  for (int64_t g = many ? d.between(190, 400) : d.between(1, 9); g > 0; --g)
    s.rows.push_back(d.between(0, 2) == 0 ? d.between(0, 1) : many ? d.between(0, 3) : d.between(0, 150));
  return s;
}

// Products of groups of rows on a GPU, compared with the CPU's, and with those of a launch for each group alone.
class RowsOfGroups {
 public:
  RowsOfGroups(const Sizes& s, DType dtype, const ArenaPtr& arena) : s_(s), dtype_(dtype), arena_(arena) {
    for (const int64_t rows : s.rows) all_ += rows;
    x_ = drawn({all_ + 1, s.k}, dtype, "x").narrow(0, 1, all_);  // which begins anywhere
    x_there_ = drawn({all_ + 1, s.k}, dtype, "x").to(arena).narrow(0, 1, all_);
    dy_ = drawn({all_, s.n}, dtype, "dy");
    dy_there_ = dy_.to(arena);
    const auto all = std::ssize(s.rows);
    const Tensor w = drawn({all * s.n, s.k}, dtype, "w"), w_there = w.to(arena);
    for (int64_t g = 0; g < all; ++g) {
      groups_.push_back({w.narrow(0, g * s.n, s.n), s.rows[static_cast<size_t>(g)]});
      there_.push_back({w_there.narrow(0, g * s.n, s.n), groups_.back().rows});
    }
  }

  void check() {
    const Tensor y = linear_rows(x_there_, there_), dx = linear_rows_input_grad(dy_there_, there_);
    expect_product(y, linear_rows(x_, groups_), dtype_);
    expect_product(dx, linear_rows_input_grad(dy_, groups_), dtype_);
    int64_t at = 0;
    for (size_t g = 0; g < std::min<size_t>(9, there_.size()); ++g) {
      const int64_t m = s_.rows[g];
      EXPECT_TRUE(same_bits(linear_rows(x_there_.narrow(0, at, m), {there_[g]}), y.narrow(0, at, m)));
      EXPECT_TRUE(same_bits(linear_rows_input_grad(dy_there_.narrow(0, at, m), {there_[g]}), dx.narrow(0, at, m)));
      at += m;
    }
  }

  // In each dtype that a gradient may have; also where it does not run on.
  void check_gradients() {
    for (const DType to : {dtype_, wide_of(dtype_)}) check_gradients(to, false);
    check_gradients(DType::float32, true);
  }

 private:
  void check_gradients(DType to, bool turned) {
    std::vector<RowsGroup> here, there;
    for (size_t g = 0; g < groups_.size(); ++g) {
      here.push_back({x_.make({s_.n, s_.k}, to), s_.rows[g]});
      Tensor w = turned ? Tensor::empty({s_.k, s_.n}, to, arena_).transpose(0, 1) : here[g].w.to(arena_);
      w.fill(std::numeric_limits<double>::quiet_NaN());
      there.push_back({w, s_.rows[g]});
      if (g % 4 == 3) here[g].w = there[g].w = Tensor();  // nobody wants it
    }
    linear_rows_weight_grads(here, dy_, x_);
    linear_rows_weight_grads(there, dy_there_, x_there_);
    std::vector<RowsGroup> sums = there;  // gradients made once more; every second group adds them to the first ones
    for (size_t g = 0; g < here.size(); ++g) {
      if (!here[g].w.defined()) continue;
      expect_product(there[g].w, here[g].w, dtype_);
      EXPECT_TRUE(s_.rows[g] > 0 || same_bits(there[g].w, Tensor::zeros({s_.n, s_.k}, to, x_.arena())));
      sums[g].w = there[g].w.clone();
      sums[g].adds = g % 2 == 0;
    }
    linear_rows_weight_grads(sums, dy_there_, x_there_);
    for (size_t g = 0; g < here.size(); ++g) {
      if (!here[g].w.defined()) continue;
      Tensor expected = there[g].w.clone();
      if (sums[g].adds) add_(expected, there[g].w);
      EXPECT_TRUE(same_bits(sums[g].w, expected)) << g;
    }
  }

  Sizes s_;
  DType dtype_;
  ArenaPtr arena_;
  int64_t all_ = 0;
  Tensor x_, dy_, x_there_, dy_there_;
  std::vector<RowsGroup> groups_, there_;
};

TEST_F(ExpertsGpu, ProductsOfAnyNumbersOfRows) {
  std::vector<Sizes> all = {{{1}, 1, 1},         {{0}, 5, 3},     {{64}, 64, 64}, {{65}, 63, 129},
                            {{3}, 200, 72},      {{130}, 96, 40}, {{17}, 8, 264}, {{257, 0, 0, 1}, 24, 136},
                            {{0, 0, 9}, 300, 7}, {{0, 0}, 8, 8}};
  for (uint64_t trial = 0; trial < test::plans(20); ++trial) {
    Draw d("products", trial);
    all.push_back(draw_sizes(d));
  }
  for (const Sizes& s : all)
    for (const DType dtype : test::floating(arena)) {
      SCOPED_TRACE(std::string(name_of(dtype)) + " " + Shape({std::ssize(s.rows), s.k, s.n}).str());
      RowsOfGroups rows(s, dtype, arena);
      rows.check();
      rows.check_gradients();
    }
}

// Whatever rows and groups are beside it, and how many: also where other tiles are taken for more of them.
TEST_F(ExpertsGpu, ARowHasItsOwnBits) {
  for (const DType dtype : test::floating(arena)) {
    const int64_t m = dtype == DType::float64 ? 150 : 2100, k = 24, n = 1040;
    const Tensor x = drawn({m, k}, dtype, "x").to(arena), w = drawn({n, k}, dtype, "w").to(arena),
                 dy = drawn({m, k}, dtype, "dy").to(arena), back = drawn({k, n}, dtype, "back").to(arena);
    const std::vector<RowsGroup> once{{w, m}}, twice{{w, 70}, {w, m - 70}};
    const Tensor y = linear_rows(x, once), dx = linear_rows_input_grad(dy, {{back, m}});
    for (const auto& [first, count] : {std::pair<int64_t, int64_t>{0, 1}, {m - 1, 1}, {13, 50}, {61, 70}, {20, 0}}) {
      SCOPED_TRACE(std::string(name_of(dtype)) + " " + std::to_string(first));
      EXPECT_TRUE(same_bits(linear_rows(x.narrow(0, first, count), {{w, count}}), y.narrow(0, first, count)));
      EXPECT_TRUE(
          same_bits(linear_rows_input_grad(dy.narrow(0, first, count), {{back, count}}), dx.narrow(0, first, count)));
    }
    EXPECT_TRUE(same_bits(linear_rows(x, once), y));
    EXPECT_TRUE(same_bits(linear_rows(x, twice), y));
  }
}

}  // namespace
}  // namespace tessera
