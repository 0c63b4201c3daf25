// Structured GPU ops beyond the op table: long rows, many rows, repeated tokens, invalid indices, vocabulary shards,
// dropout tiles; and mixture-of-experts ops with random routing and row counts.
#include <algorithm>
#include <array>
#include <cstdint>
#include <limits>
#include <map>
#include <numeric>
#include <string>
#include <tuple>
#include <vector>

#include "tensor/ops/activations.h"
#include "tensor/ops/attention/attention.h"
#include "tensor/ops/dropout.h"
#include "tensor/ops/elementwise.h"
#include "tensor/ops/embedding.h"
#include "tensor/ops/experts/experts.h"
#include "tensor/ops/norm.h"
#include "tensor/ops/softmax.h"
#include "tests/support/draw.h"
#include "tests/support/errors.h"
#include "tests/support/gpu.h"
#include "tests/support/tensors.h"
#include "tests/support/two_libraries.h"

namespace tessera {
namespace {

using namespace test;

using StructuredGpu = test::OnGpu;

// Elements may differ by a different rounding (half an ulp) and by the error of their sums.
double bound(DType dtype) { return dtype == DType::float64 ? 1e-13 : dtype == DType::float32 ? 1e-5 : 8e-3; }

Tensor make_ids(const std::vector<int32_t>& v) {
  return Tensor::of<int32_t>(v, {static_cast<int64_t>(v.size())}, make_arena());
}
std::vector<int32_t> random_ids(int64_t n, int64_t below, const std::string& name) {
  const auto id = [&](size_t i) { return Philox::named(3, name).below(static_cast<uint64_t>(below), i); };
  return made({n}, DType::int32, make_arena(), id).to_vector<int32_t>();
}

// Rows that fit in a warp, in a block's registers, or in neither; of full vectors of 16 bytes or not.
TEST_F(StructuredGpu, NormsAndSoftmaxSupportAnyRowLength) {
  for (const DType dtype : test::floating(arena))
    for (const int64_t c : {1, 96, 1001, 2048, 4100, 8193, 17000}) {
      SCOPED_TRACE(std::string(to_string(dtype)) + " " + std::to_string(c));
      const Tensor x = random_tensor({3, c}, dtype, "x"), y = random_tensor({3, c}, dtype, "y"),
                   gamma = random_tensor({c}, dtype, "gamma"), beta = random_tensor({c}, dtype, "beta");
      const AddNormed here = add_norm(x, y.clone(), gamma, beta),
                      there = add_norm(x.to(arena), y.to(arena), gamma.to(arena), beta.to(arena));
      EXPECT_TRUE(bitwise_equal(there.sum, here.sum));
      if (c > 1) {
        EXPECT_LT(apart(there.normed.y, here.normed.y), bound(dtype));
        const Tensor dx = norm_backward(y, x, gamma, here.normed, Tensor());
        const Normed on_gpu{Tensor(), here.normed.mean.to(arena), here.normed.rstd.to(arena)};
        EXPECT_LT(apart(norm_backward(y.to(arena), x.to(arena), gamma.to(arena), on_gpu, Tensor()), dx), bound(dtype));
        const Tensor more = norm_backward(y, x, gamma, here.normed, x.clone());
        EXPECT_LT(apart(norm_backward(y.to(arena), x.to(arena), gamma.to(arena), on_gpu, x.to(arena).clone()), more),
                  bound(dtype));
      }
      EXPECT_LT(apart(softmax(x.to(arena)), softmax(x)), bound(dtype));
      EXPECT_LT(apart(log_softmax(x.to(arena)), log_softmax(x)), bound(dtype));
      EXPECT_LT(apart(softmax_backward(y.to(arena), x.to(arena)), softmax_backward(y, x)), bound(dtype));
      EXPECT_LT(apart(log_softmax_backward(y.to(arena), x.to(arena)), log_softmax_backward(y, x)), bound(dtype));
    }
}

// More rows than one run, and rows not aligned to 16 bytes.
TEST_F(StructuredGpu, SumsOverManyRowsMatchCpu) {
  for (const DType dtype : test::floating(arena))
    for (const Shape& shape : {Shape{9000, 5}, Shape{70000, 2}, Shape{65, 40}, Shape{0, 3}}) {
      SCOPED_TRACE(std::string(to_string(dtype)) + " " + shape.str());
      const Tensor x = random_tensor(shape, dtype, "x", 0.5, 1.5), there = x.to(arena);
      Tensor expected = x.make({shape[1]}, DType::float64), found = there.make({shape[1]}, accum_dtype(dtype));
      sum_rows(expected, x.to(DType::float64));
      sum_rows(found, there);
      EXPECT_LT(apart(found, expected), dtype == DType::float64 ? 1e-13 : 1e-5);
      Tensor narrow = there.make({shape[1], 2}, DType::bfloat16).select(1, 1);
      sum_rows(narrow, there);
      EXPECT_TRUE(bitwise_equal(narrow, found.to(DType::float32).to(DType::bfloat16)));
      EXPECT_TRUE(bitwise_equal(sum(there), sum(x)));
      if (shape[0] < 3) continue;
      Tensor all = there.make({shape[1]}), part = there.make({shape[1]});
      sum_rows(all, there.narrow(0, 1, shape[0] - 1).clone());
      sum_rows(part, there.narrow(0, 1, shape[0] - 1));
      EXPECT_TRUE(bitwise_equal(all, part));
      const Tensor wide = sum_to(there.reshape({shape[0], shape[1], 1}).transpose(0, 1), {shape[1], 1, 1});
      EXPECT_TRUE(bitwise_equal(wide, sum_to(x.reshape({shape[0], shape[1], 1}).transpose(0, 1), {shape[1], 1, 1})));
    }
}

TEST_F(StructuredGpu, WeightGradientsOfManyRowsMatchCpu) {
  for (const DType dtype : test::floating(arena))
    for (const Shape& shape : {Shape{9000, 5}, Shape{130, 64}, Shape{40, 4100}, Shape{33, 8193}, Shape{0, 8}}) {
      SCOPED_TRACE(std::string(to_string(dtype)) + " " + shape.str());
      const Tensor x = random_tensor(shape, dtype, "x"), dy = random_tensor(shape, dtype, "dy", 0, 1),
                   c = random_tensor({shape[1]}, dtype, "c");
      const Normed here = norm(x, c, c), there{Tensor(), here.mean.to(arena), here.rstd.to(arena)};
      const NormSums sums{.gamma = {x.make({shape[1]})}, .beta = {x.make({shape[1]}, DType::float32)}};
      norm_backward(dy, x, c, here, {}, sums);
      // The sums go into targets of two dtypes, one of them non-contiguous and accumulated.
      Tensor parts, gamma = x.to(arena).make({shape[1], 2}).select(1, 1),
                    beta = x.to(arena).make({shape[1]}, DType::float32);
      gamma.fill(0);
      beta.fill(0);
      const NormSums sums_there{.gamma = {gamma, true}, .beta = {beta, false}, .partials = &parts};
      const Tensor dx = norm_backward(dy.to(arena), x.to(arena), c.to(arena), there, {}, sums_there);
      EXPECT_LT(apart(gamma, sums.gamma.to), 20 * bound(dtype));
      EXPECT_LT(apart(beta, sums.beta.to), bound(dtype));
      // The kernel that computes dx also makes the first pass of a bias gradient.
      Tensor along = beta.clone(), alone = beta.clone();
      sum_partials(along, parts);
      sum_rows(alone, dx);
      EXPECT_TRUE(bitwise_equal(along, alone));
      // An accumulated gradient is rounded before the addition.
      Tensor twice = along.clone();
      const NormSums again{.beta = {twice, true}};
      norm_backward(dy.to(arena), x.to(arena), c.to(arena), there, {}, again);
      add_(along, beta);
      EXPECT_TRUE(bitwise_equal(twice, along));
      if (shape[0] == 0) continue;
      for (const Activation kind : {Activation::gelu, Activation::gelu_erf, Activation::silu}) {
        Tensor dbias = sums.gamma.to.clone(), dbias_there = gamma.contiguous();
        const Tensor dh = bias_activation_backward(dy.clone(), x, &dbias, kind);
        const Tensor dh_there = bias_activation_backward(dy.to(arena).clone(), x.to(arena), &dbias_there, kind);
        with_activation(kind, [&](auto op) { test::expect_near_gradient<decltype(op)>(dh_there, dh, dy, x); });
        EXPECT_LT(apart(dbias_there, dbias), bound(dtype));
      }
    }
}

// Cases: a table row with more tokens than a block collects at a time, rows without tokens, and a table of a different
// dtype.
TEST_F(StructuredGpu, EmbeddingGradientsAreSummedInTokenOrder) {
  for (const int64_t vocab : {3, 300, 2100})
    for (const DType dtype : test::floating(arena)) {
      SCOPED_TRACE(std::string(to_string(dtype)) + " " + std::to_string(vocab));
      std::vector<int32_t> v = random_ids(vocab == 3 ? 9000 : 700, vocab, "ids");
      std::fill(v.begin() + 200, v.begin() + 500, 1);
      const Tensor ids = make_ids(v), dy = random_tensor({ids.numel(), vocab == 3 ? 9 : 72}, dtype, "dy");
      for (const DType to : {dtype, DType::float32}) {
        if (to == DType::float32 && dtype == DType::float64) continue;
        Tensor here = dy.make({vocab, dy.dim(1)}, to), there = here.to(arena);
        embedding_backward(here, dy, ids);
        embedding_backward(there, dy.to(arena), ids.to(arena));
        EXPECT_TRUE(bitwise_equal(there, here));
      }
    }
}

TEST_F(StructuredGpu, NextWaitReportsInvalidIndices) {
  const Tensor table = random_tensor({50, 8}, DType::float32, "table"), there = table.to(arena);
  const Tensor ids = make_ids({1, 2, 70000, 3, -4});
  const std::string expected = error_message([&] { embedding(ids, table); });
  EXPECT_EQ(expected, "[embedding] id 70000 at position 2 is outside [0, 50)");
  Tensor rows = embedding(ids.to(arena), there);
  EXPECT_EQ(error_message([&] { rows.to_vector<float>(); }), expected);
  const std::vector<float> after = rows.to_vector<float>();  // reported once; rows of invalid ids are zero
  EXPECT_EQ(after[2 * 8 + 3], 0);
  EXPECT_EQ(after[8 + 3], table.to_vector<float>()[2 * 8 + 3]);
  EXPECT_EQ(error_message([&] { ids_on_device(there, ids); }), expected);
  Tensor gradient = there.clone();
  embedding_backward(gradient, rows, ids.to(arena));
  EXPECT_EQ(error_message([&] { gradient.to_vector<float>(); }), expected);

  const Tensor logits = random_tensor({4, 10}, DType::float32, "logits"), targets = make_ids({1, -1, 10, -2});
  const std::string outside = error_message([&] { cross_entropy(logits, targets); });
  EXPECT_EQ(outside, "[cross_entropy] target 10 of row 2 is outside [0, 10)");
  EXPECT_EQ(
      error_message([&] { static_cast<void>(double(cross_entropy(logits.to(arena), targets.to(arena)).loss_sum)); }),
      outside);
  EXPECT_EQ(error_message([&] { targets_on_device(logits.to(arena), targets, 10); }), outside);
  // More tables than slots for index checks.
  for (int64_t vocab = 1; vocab < 200; ++vocab)
    embedding(make_ids({0}).to(arena), random_tensor({vocab, 2}, DType::float32, "t").to(arena));
  EXPECT_EQ(
      error_message([&] {
        embedding(make_ids({199}).to(arena), random_tensor({199, 2}, DType::float32, "t").to(arena)).to_vector<float>();
      }),
      "[embedding] id 199 at position 0 is outside [0, 199)");
}

TEST_F(StructuredGpu, CrossEntropyOfFullAndShardedVocabMatchesCpu) {
  for (const DType dtype : test::floating(arena))
    for (const int64_t vocab : {7, 1024, 5003}) {
      SCOPED_TRACE(std::string(to_string(dtype)) + " " + std::to_string(vocab));
      std::vector<int32_t> v = random_ids(70, vocab, "targets");
      v[3] = v[69] = -1;
      const Tensor targets = make_ids(v), on_gpu = targets.to(arena),
                   logits = random_tensor({70, vocab}, dtype, "logits", -9, 9);
      const CrossEntropy here = cross_entropy(logits, targets), there = cross_entropy(logits.to(arena), on_gpu);
      const double near = dtype == DType::float64 ? 1e-14 : 1e-6;
      EXPECT_EQ(there.count, 68);
      EXPECT_NEAR(there.loss_sum, here.loss_sum, near * here.loss_sum);
      EXPECT_EQ(there.sum.item<double>(), there.loss_sum);
      EXPECT_LT(apart(there.lse, here.lse), near);
      const Tensor dx = cross_entropy_backward(logits.clone(), targets, here.lse, 0.25);
      const Tensor full = cross_entropy_backward(logits.to(arena), on_gpu, there.lse, 0.25);
      EXPECT_LT(apart(full, dx), bound(dtype));
      const int64_t cut = vocab / 3;
      const Tensor parts[] = {logits.to(arena).narrow(1, 0, cut), logits.to(arena).narrow(1, cut, vocab - cut)};
      const VocabShard at[] = {{0, vocab}, {cut, vocab}};
      const Tensor top = binary<Maximum>(row_max(parts[0]), row_max(parts[1])),
                   sum = binary<Add>(row_sum_exp(parts[0], top), row_sum_exp(parts[1], top)),
                   own = binary<Add>(target_logits(parts[0], on_gpu, at[0]), target_logits(parts[1], on_gpu, at[1]));
      const CrossEntropy joined = joined_cross_entropy(top, sum, own, on_gpu);
      EXPECT_EQ(joined.count, 68);
      EXPECT_NEAR(joined.loss_sum, here.loss_sum, near * here.loss_sum);
      for (size_t i = 0; i < 2; ++i) {
        const Tensor mine = cross_entropy_backward(parts[i].clone(), on_gpu, there.lse, 0.25, at[i]);
        EXPECT_TRUE(bitwise_equal(mine, full.narrow(1, at[i].first, mine.dim(1))));
      }
    }
}

// A GPU keeps the row in shared memory if it fits and is a multiple of 16 bytes, and otherwise uses two kernels.
TEST_F(StructuredGpu, CrossEntropyInPlaceMatchesTwoPassesBitwise) {
  for (const ArenaPtr& where : {arena, make_arena()})
    for (const DType dtype : test::floating(arena))
      for (const int64_t vocab : {7, 512, 5003, 8192, 40000}) {
        SCOPED_TRACE(std::string(to_string(dtype)) + " " + std::to_string(vocab));
        std::vector<int32_t> v = random_ids(9, vocab, "targets");
        v[3] = -1;
        const Tensor targets = make_ids(v).to(where),
                     logits = random_tensor({9, vocab}, dtype, "logits", -9, 9).to(where);
        Tensor x = logits.clone();
        const CrossEntropy apart = cross_entropy(logits, targets), both = cross_entropy_in_place(x, targets, 0.25);
        EXPECT_TRUE(double(both.loss_sum) == double(apart.loss_sum) && double(both.count) == double(apart.count));
        EXPECT_TRUE(bitwise_equal(both.lse, apart.lse));
        const Tensor dx = cross_entropy_backward(logits.clone(), targets, apart.lse, 0.25);
        EXPECT_TRUE(bitwise_equal(x, dx));
        Tensor factor = Tensor::empty({}, DType::float64, where);
        for (const double by : {1.0, 0.5}) {
          factor.fill(by);
          scale_rows_(x, factor);
          EXPECT_TRUE(bitwise_equal(x, scale(dx, by))) << by;
        }
      }
}

// Losses are summed in blocks of 4096 rows; and a row with masked logits.
TEST_F(StructuredGpu, LossesOfManyRowsAreSummedInBlocks) {
  const std::vector<int32_t> v = random_ids(9001, 3, "targets");
  const Tensor logits = random_tensor({9001, 3}, DType::float32, "logits").to(arena), targets = make_ids(v).to(arena);
  const CrossEntropy all = cross_entropy(logits, targets);
  double parts = 0;
  for (const int64_t first : {0, 4096, 8192}) {
    const int64_t n = std::min<int64_t>(4096, 9001 - first);
    parts += cross_entropy(logits.narrow(0, first, n), targets.narrow(0, first, n)).loss_sum;
  }
  EXPECT_EQ(all.loss_sum, parts);
  EXPECT_EQ(all.count, 9001);
  Tensor masked = random_tensor({1, 3000}, DType::bfloat16, "m");
  masked.narrow(1, 0, 2500).fill(-std::numeric_limits<double>::infinity());
  EXPECT_NEAR(cross_entropy(masked.to(arena), make_ids({2700}).to(arena)).loss_sum,
              cross_entropy(masked.narrow(1, 2500, 500), make_ids({200})).loss_sum, 1e-5);
}

TEST_F(StructuredGpu, DropoutMasksMatchCpu) {
  for (const DType dtype : test::floating(arena))
    for (const int64_t c : {1, 6, 8, 20, 64}) {
      const std::vector<int64_t> positions = {7, 0, 3, 9, 2};
      for (const int64_t first_channel : {0, 3, 4}) {
        const Tensor x = random_tensor({2, 5, c}, dtype, "x");
        DropoutTile tile{.random = Philox(5),
                         .step = (uint64_t{1} << 40) + 9,
                         .first_sequence = 3,
                         .tokens_total = 10,
                         .channels_total = first_channel + c + (first_channel == 3 ? 2 : 0),
                         .first_channel = first_channel,
                         .positions = {}};
        if (first_channel > 0) tile.positions = positions;
        EXPECT_TRUE(bitwise_equal(dropout(x.to(arena), 0.3, tile), dropout(x.clone(), 0.3, tile)))
            << to_string(dtype) << " " << c << " from " << first_channel;
      }
    }
}

TEST_F(StructuredGpu, MergeAttentionMatchesCpu) {
  for (const DType dtype : test::floating(arena)) {
    if (dtype == DType::bfloat16) continue;
    const AttentionResult a{random_tensor({2, 5, 3, 40}, dtype, "a"), random_tensor({2, 3, 5}, dtype, "la")},
        b{random_tensor({2, 5, 3, 40}, dtype, "b"), random_tensor({2, 3, 5}, dtype, "lb")};
    Tensor wide = a.out.make({2, 5, 3, 50}).to(arena);
    const AttentionResult there{wide.narrow(3, 4, 40), a.lse.to(arena)}, other{b.out.to(arena), b.lse.to(arena)};
    Tensor(there.out).copy_from(a.out);
    merge_attention(a, b);
    merge_attention(there, other);
    EXPECT_LT(apart(there.out, a.out), bound(dtype) / 10);
    EXPECT_LT(apart(there.lse, a.lse), bound(dtype) / 10);
  }
}

// Mixture-of-experts ops on a GPU against the CPU: choices, row assignment and counts of random routings, dispatch and
// combine, and grouped GEMM with any row counts.

using ExpertsGpu = test::OnGpu;

struct Routing {
  Tensor logits;
  RouteOptions options = {};
};

// Random routings with long sequences, many experts or given choices. Sometimes logits have few distinct values, so
// that many are equal. `crowded`: the given choices come from different logits, and some are dropped.
Routing random_routing(Sampler& d, DType dtype, bool crowded) {
  const int64_t experts = crowded ? 5 : d.of<int64_t>({1, 2, 5, 8, 33, 64, 300, 2000}), sequences = d.between(1, 4),
                length = crowded ? 40 : std::min<int64_t>(experts > 64 ? 5 : 300, d.of<int64_t>({1, 3, 40, 300})),
                n = sequences * length;
  const double range = d.of({3.0, 0.01, 30.0});
  Routing r{.logits = random_tensor({n, experts}, dtype, "logits" + std::to_string(d.between(0, 1000)), -range, range)};
  if (d.between(0, 2) == 0) r.logits = made({n, experts}, dtype, make_arena(), [&](size_t) { return d.between(0, 2); });
  r.options = {.per_token = d.between(1, crowded ? 2 : std::min<int64_t>(experts, 6)),
               .softmax_first = d.between(0, 1) == 1,
               .sequences = sequences,
               .capacity = crowded ? 1 : d.of<int64_t>({0, 0, 1, 7, 100}),
               .balance = d.of({0.0, 0.3}),
               .z = d.of({0.0, 0.1}),
               .tokens = d.of<int64_t>({0, 2 * length})};
  if (crowded || d.between(0, 2) == 0) {
    const Tensor moved = random_tensor({n, experts}, dtype, "moved", -range, range);
    r.options.replayed = route(crowded || d.between(0, 1) == 0 ? moved : r.logits, r.options).chosen;
  }
  return r;
}

TEST_F(ExpertsGpu, RoutingMatchesCpu) {
  int64_t dropped = 0, elsewhere = 0;
  for (uint64_t trial = 0; trial < test::plans(40); ++trial)
    for (const DType dtype : test::floating(arena)) {
      Sampler d("routing", trial);
      const Routing r = random_routing(d, dtype, trial == 0);
      SCOPED_TRACE(std::to_string(trial) + " " + r.logits.describe());
      const Routed here = route(r.logits, r.options), there = route(r.logits.to(arena), r.options);
      EXPECT_TRUE(
          bitwise_equal({there.chosen, there.place, there.of_sequences}, {here.chosen, here.place, here.of_sequences}));
      EXPECT_EQ(there.counts, here.counts);
      EXPECT_EQ(std::tuple(there.rows, there.dropped, there.elsewhere, there.margin),
                std::tuple(here.rows, here.dropped, here.elsewhere, here.margin));
      if (dtype == DType::float64)  // exponentials come from the C library and from CUDA
        EXPECT_LT(test::farthest(there.weights, here.weights), 1e-14);
      else
        EXPECT_TRUE(bitwise_equal(there.weights, here.weights));
      dropped += here.dropped;
      elsewhere += here.elsewhere;

      const Tensor dweights = random_tensor(here.weights.shape(), here.weights.dtype(), "dweights");
      const Tensor expected = route_backward(dweights, r.logits, here, r.options),
                   found = route_backward(dweights.to(arena), r.logits.to(arena), there, r.options);
      EXPECT_LT(apart(found, expected), bound(dtype));
    }
  EXPECT_TRUE(dropped > 0 && elsewhere > 0);
}

// With NaN logits every choice is still a valid expert.
TEST_F(ExpertsGpu, ChoicesAreValidForAnyLogits) {
  constexpr float kNan = std::numeric_limits<float>::quiet_NaN(), kInfinity = std::numeric_limits<float>::infinity();
  const std::vector<float> values = {kNan, 1,    2,    3, 1, kNan,       3, 2, kNan,      kNan,      kNan,       kNan,
                                     1,    kNan, kNan, 0, 0, -kInfinity, 0, 0, kInfinity, kInfinity, -kInfinity, 5};
  const Tensor logits = Tensor::of<float>(values, {6, 4}, make_arena());
  for (int64_t k = 1; k <= 4; ++k) {
    const Routed here = route(logits, {.per_token = k}), there = route(logits.to(arena), {.per_token = k});
    EXPECT_EQ(there.counts, here.counts);
    EXPECT_TRUE(bitwise_equal(there.chosen, here.chosen) && bitwise_equal(there.place, here.place));
  }
}

// The host waits for the row counts of the experts, and for nothing else.
TEST_F(ExpertsGpu, HostWaitsOncePerLayer) {
  const Tensor logits = random_tensor({64, 8}, DType::float32, "logits").to(arena),
               x = random_tensor({64, 16}, DType::float32, "x").to(arena),
               w = random_tensor({16, 16}, DType::float32, "w").to(arena);
  const RouteOptions o{.per_token = 2, .sequences = 2, .capacity = 9, .balance = 1, .z = 1};
  const auto waits = [&]() -> int64_t {
    if constexpr (kWithCuda) return cuda::synchronizations(*arena);
    return 0;
  };
  const int64_t before = waits();
  const Routed routed = route(logits, o);
  std::vector<GemmGroup> groups, gradients;
  for (const int64_t count : routed.counts) {
    groups.push_back({w, count});
    gradients.push_back({w.clone(), count});
  }
  const Tensor rows = grouped_linear(dispatch_rows(x, routed), groups), y = combine_rows(rows, routed.weights, routed);
  const CombineGrads d = combine_rows_backward(y, rows, routed.weights, routed);
  route_backward(d.weights, logits, routed, o);
  grouped_linear_weight_grads(gradients, d.rows, rows);
  dispatch_rows_backward(grouped_linear_input_grad(d.rows, groups), routed);
  EXPECT_EQ(waits() - before, 1);
}

// Rows that fit in a warp or need a block, of full vectors of 16 bytes or not; also dropped choices.
TEST_F(ExpertsGpu, DispatchAndCombineMatchCpu) {
  for (uint64_t trial = 0; trial < test::plans(20); ++trial)
    for (const DType dtype : test::floating(arena)) {
      Sampler d("rows", trial);
      const Routing r = random_routing(d, dtype, trial == 0);
      const int64_t n = r.logits.dim(0), c = d.of<int64_t>({1, 5, 8, 64, 300, 1100, 2304});
      SCOPED_TRACE(std::to_string(trial) + " " + r.logits.describe() + " " + std::to_string(c));
      const Routed here = route(r.logits, r.options);
      Routed there = here;
      there.place = here.place.to(arena);
      const Tensor x = random_tensor({n, c}, dtype, "x"), rows = dispatch_rows(x, here);
      EXPECT_TRUE(bitwise_equal(dispatch_rows(x.to(arena), there), rows));
      EXPECT_TRUE(bitwise_equal(dispatch_rows_backward(rows.to(arena), there), dispatch_rows_backward(rows, here)));
      const Tensor w = here.weights, w_there = w.to(arena);
      EXPECT_TRUE(bitwise_equal(combine_rows(rows.to(arena), w_there, there), combine_rows(rows, w, here)));
      const CombineGrads expected = combine_rows_backward(x, rows, w, here),
                         found = combine_rows_backward(x.to(arena), rows.to(arena), w_there, there);
      EXPECT_TRUE(bitwise_equal(found.rows, expected.rows));
      EXPECT_LT(apart(found.weights, expected.weights), dtype == DType::float64 ? 1e-13 : 1e-5);
    }
}

// Tensor cores accumulate bfloat16 in groups of sixteen, so only a bound applies; other dtypes are bitwise identical to
// the CPU.
void expect_product(const Tensor& found, const Tensor& expected, DType dtype) {
  if (dtype != DType::bfloat16)
    EXPECT_TRUE(bitwise_equal(found, expected));
  else
    EXPECT_LT(apart(found, expected), bound(expected.dtype()));
}

struct Sizes {
  std::vector<int64_t> rows;  // rows per group
  int64_t k, n;
};

// Empty groups, single rows, partial tiles and several tiles; sometimes more groups than one launch supports.
Sizes random_sizes(Sampler& d) {
  const bool many = d.between(0, 5) == 0;
  const int64_t unit = d.of<int64_t>({1, 8}), max_factor = (many ? 30 : 150) / unit;
  Sizes s{.rows = {}, .k = unit * d.between(1, max_factor), .n = unit * d.between(1, max_factor)};
  for (int64_t g = many ? d.between(190, 400) : d.between(1, 9); g > 0; --g)
    s.rows.push_back(d.between(0, 2) == 0 ? d.between(0, 1) : many ? d.between(0, 3) : d.between(0, 150));
  return s;
}

// Grouped GEMM on a GPU, compared with the CPU and with separate launches for each group.
class RowsOfGroups {
 public:
  RowsOfGroups(const Sizes& s, DType dtype, const ArenaPtr& arena) : s_(s), dtype_(dtype), arena_(arena) {
    const int64_t rows = std::accumulate(s.rows.begin(), s.rows.end(), int64_t{0});
    const Tensor longer = random_tensor({rows + 1, s.k}, dtype, "x");
    x_ = longer.narrow(0, 1, rows);  // unaligned
    x_there_ = longer.to(arena).narrow(0, 1, rows);
    dy_ = random_tensor({rows, s.n}, dtype, "dy");
    dy_there_ = dy_.to(arena);
    const auto all = std::ssize(s.rows);
    const Tensor w = random_tensor({all * s.n, s.k}, dtype, "w"), w_there = w.to(arena);
    for (int64_t g = 0; g < all; ++g) {
      groups_.push_back({w.narrow(0, g * s.n, s.n), s.rows[static_cast<size_t>(g)]});
      there_.push_back({w_there.narrow(0, g * s.n, s.n), groups_.back().rows});
    }
  }

  void check() {
    const Tensor y = grouped_linear(x_there_, there_), dx = grouped_linear_input_grad(dy_there_, there_);
    expect_product(y, grouped_linear(x_, groups_), dtype_);
    expect_product(dx, grouped_linear_input_grad(dy_, groups_), dtype_);
    int64_t at = 0;
    for (size_t g = 0; g < std::min<size_t>(9, there_.size()); ++g) {
      const int64_t m = s_.rows[g];
      const std::vector<GemmGroup> alone{there_[g]};
      EXPECT_TRUE(bitwise_equal({grouped_linear(x_there_.narrow(0, at, m), alone),
                                 grouped_linear_input_grad(dy_there_.narrow(0, at, m), alone)},
                                {y.narrow(0, at, m), dx.narrow(0, at, m)}));
      at += m;
    }
  }

  // Checks weight gradients of each supported dtype, also non-contiguous ones.
  void check_gradients() {
    for (const DType to : {dtype_, accum_dtype(dtype_)}) check_gradients(to, false);
    check_gradients(DType::float32, true);
  }

 private:
  void check_gradients(DType to, bool turned) {
    std::vector<GemmGroup> here, there;
    for (size_t g = 0; g < groups_.size(); ++g) {
      here.push_back({x_.make({s_.n, s_.k}, to), s_.rows[g]});
      Tensor w = turned ? Tensor::empty({s_.k, s_.n}, to, arena_).transpose(0, 1) : here[g].w.to(arena_);
      w.fill(std::numeric_limits<double>::quiet_NaN());
      there.push_back({w, s_.rows[g]});
      if (g % 4 == 3) here[g].w = there[g].w = Tensor();  // not requested
    }
    grouped_linear_weight_grads(here, dy_, x_);
    grouped_linear_weight_grads(there, dy_there_, x_there_);
    std::vector<GemmGroup> sums = there;  // gradients of a second call; every second group accumulates
    for (size_t g = 0; g < here.size(); ++g) {
      if (!here[g].w.defined()) continue;
      expect_product(there[g].w, here[g].w, dtype_);
      EXPECT_TRUE(s_.rows[g] > 0 || bitwise_equal(there[g].w, Tensor::zeros({s_.n, s_.k}, to, x_.arena())));
      sums[g].w = there[g].w.clone();
      sums[g].adds = g % 2 == 0;
    }
    grouped_linear_weight_grads(sums, dy_there_, x_there_);
    for (size_t g = 0; g < here.size(); ++g) {
      if (!here[g].w.defined()) continue;
      Tensor expected = there[g].w.clone();
      if (sums[g].adds) add_(expected, there[g].w);
      EXPECT_TRUE(bitwise_equal(sums[g].w, expected)) << g;
    }
  }

  Sizes s_;
  DType dtype_;
  ArenaPtr arena_;
  Tensor x_, dy_, x_there_, dy_there_;
  std::vector<GemmGroup> groups_, there_;
};

TEST_F(ExpertsGpu, GroupedGemmMatchesCpuForAnyRowCounts) {
  std::vector<Sizes> all = {{{1}, 1, 1},         {{0}, 5, 3},     {{64}, 64, 64}, {{65}, 63, 129},
                            {{3}, 200, 72},      {{130}, 96, 40}, {{17}, 8, 264}, {{257, 0, 0, 1}, 24, 136},
                            {{0, 0, 9}, 300, 7}, {{0, 0}, 8, 8}};
  for (uint64_t trial = 0; trial < test::plans(20); ++trial) {
    Sampler d("products", trial);
    all.push_back(random_sizes(d));
  }
  for (const Sizes& s : all)
    for (const DType dtype : test::floating(arena)) {
      SCOPED_TRACE(std::string(to_string(dtype)) + " " + Shape({std::ssize(s.rows), s.k, s.n}).str());
      RowsOfGroups rows(s, dtype, arena);
      rows.check();
      rows.check_gradients();
    }
}

// Results are equal even if a different number of rows or groups selects a different tile size.
TEST_F(ExpertsGpu, RowsAreBitwiseIndependentOfOtherRows) {
  for (const DType dtype : test::floating(arena)) {
    const int64_t m = dtype == DType::float64 ? 150 : 2100, k = 24, n = 1040;
    const Tensor x = random_tensor({m, k}, dtype, "x").to(arena), w = random_tensor({n, k}, dtype, "w").to(arena),
                 dy = random_tensor({m, k}, dtype, "dy").to(arena),
                 back = random_tensor({k, n}, dtype, "back").to(arena);
    const std::vector<GemmGroup> once{{w, m}}, twice{{w, 70}, {w, m - 70}};
    const Tensor y = grouped_linear(x, once), dx = grouped_linear_input_grad(dy, {{back, m}});
    for (const auto& [first, count] : {std::pair<int64_t, int64_t>{0, 1}, {m - 1, 1}, {13, 50}, {61, 70}, {20, 0}}) {
      SCOPED_TRACE(std::string(to_string(dtype)) + " " + std::to_string(first));
      EXPECT_TRUE(bitwise_equal(grouped_linear(x.narrow(0, first, count), {{w, count}}), y.narrow(0, first, count)));
      EXPECT_TRUE(bitwise_equal(grouped_linear_input_grad(dy.narrow(0, first, count), {{back, count}}),
                                dx.narrow(0, first, count)));
    }
    EXPECT_TRUE(bitwise_equal(grouped_linear(x, once), y));
    EXPECT_TRUE(bitwise_equal(grouped_linear(x, twice), y));
  }
}

}  // namespace
}  // namespace tessera
