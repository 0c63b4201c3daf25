// Ops beyond the op table. The head and its loss in row blocks: bitwise identical to full logits, precomputed gradients
// are visible only in the backward pass, and memory is limited to one block. Mixture-of-experts ops: independence of
// rows, router losses, errors.

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <map>
#include <numeric>
#include <string>
#include <vector>

#include "autograd/experts/ops.h"
#include "autograd/ops.h"
#include "autograd/parameter_memory.h"
#include "tests/support/errors.h"
#include "tests/support/tensors.h"

namespace tessera {
namespace {

using namespace test;

struct Sizes {
  int64_t rows, channels, vocab;
};
// Blocks have at least 32 rows: equal blocks, a remainder of one or many rows, a single block.
const Sizes kSizes[] = {{96, 24, 70}, {65, 17, 33}, {127, 8, 301}, {20, 16, 50}};
const DType kDTypes[] = {DType::float32, DType::bfloat16, DType::float64};

Tensor half_normal(const std::string& name, const Shape& shape, DType dtype, const ArenaPtr& arena) {
  const Philox random = Philox::named(3, name);
  return made(shape, dtype, arena, [&](size_t i) { return 0.5 * random.normal(i); });
}

// A hidden state, a weight with a gradient buffer, and targets.
struct Head {
  ArenaPtr arena = make_arena();
  Sizes sizes;
  Var x, w;
  Tensor targets;
  int told = 0;

  Head(const Sizes& s, DType dtype, DType grad_dtype)
      : sizes(s),
        x(Var::input(half_normal("x", {s.rows, s.channels}, dtype, arena))),
        w(half_normal("w", {s.vocab, s.channels}, dtype, arena), true) {
    sample_targets(0);
    set_grad_buffer(w, Tensor::empty({s.vocab, s.channels}, grad_dtype, arena, Category::gradients));
    w.on_grad([this] { ++told; });
  }
  void sample_targets(int64_t microbatch) {
    const Philox random = Philox::named(5 + static_cast<uint64_t>(microbatch), "targets");
    targets = made({sizes.rows}, DType::int32, arena, [&](size_t i) {
      return i % 9 == 4 ? -1 : static_cast<int64_t>(random.below(static_cast<uint64_t>(sizes.vocab), i));
    });
  }
  Loss fused(double scale = 0.3, int64_t max_bytes = 1) const {
    return linear_cross_entropy(x, w, targets, scale, nullptr, max_bytes);
  }
  // The same with full logits: matmuls in the same blocks, then a loss.
  Loss unfused(double scale = 0.3) const { return cross_entropy(linear_by_rows(x, w, nullptr, 1), targets, scale); }
  std::vector<Tensor> gradients() const { return {x.grad(), w.grad()}; }
};

TEST(Head, LossIsBitwiseEqualToFullLogits) {
  for (const Sizes& sizes : kSizes)
    for (const DType dtype : kDTypes) {
      const DType wide = dtype == DType::float64 ? dtype : DType::float32;
      for (const DType grad_dtype : {wide, dtype}) {
        Head a(sizes, dtype, grad_dtype), b(sizes, dtype, grad_dtype);
        for (int microbatch = 0; microbatch < 3; ++microbatch) {  // the first overwrites, others accumulate
          const Loss fused = a.fused(), unfused = b.unfused();
          EXPECT_EQ(fused.loss_sum, unfused.loss_sum);
          EXPECT_EQ(fused.count, unfused.count);
          EXPECT_TRUE(bitwise_equal(fused.mean.value(), unfused.mean.value()));
          backward(fused.mean);
          backward(unfused.mean);
          EXPECT_TRUE(bitwise_equal(a.gradients(), b.gradients())) << sizes.rows << " " << to_string(dtype);
          EXPECT_EQ(a.told, microbatch + 1);
          for (Head* head : {&a, &b}) head->sample_targets(microbatch + 1);
        }
      }
    }
}

// One block: its rows are bitwise identical to a single matmul; only sums over rows have a different order.
TEST(Head, AgreesWithSingleMatmul) {
  for (const Sizes& sizes : kSizes) {
    Head a(sizes, DType::float64, DType::float64), b(sizes, DType::float64, DType::float64);
    const Loss fused = a.fused(), plain = cross_entropy(linear(b.x, b.w, Var()), b.targets, 0.3);
    EXPECT_EQ(fused.loss_sum, plain.loss_sum);
    backward(fused.mean);
    backward(plain.mean);
    EXPECT_TRUE(bitwise_equal(a.x.grad(), b.x.grad()));
    const std::vector<double> x = a.w.grad().to_vector<double>(), y = b.w.grad().to_vector<double>();
    for (size_t i = 0; i < x.size(); ++i) EXPECT_NEAR(x[i], y[i], 1e-14);
  }
}

// Loss and gradients in plain float64 loops, and for each gradient element the sum of absolute terms, so that a missing
// or misplaced row is distinguished from rounding.
struct PlainHead {
  double loss = 0;
  std::vector<double> dx, dw, dx_terms, dw_terms;
};
PlainHead reference_head(const Head& h, double scale) {
  const auto rows = static_cast<size_t>(h.sizes.rows), c = static_cast<size_t>(h.sizes.channels),
             vocab = static_cast<size_t>(h.sizes.vocab);
  const std::vector<double> x = host_values(h.x.value()), w = host_values(h.w.value());
  PlainHead out{0, std::vector<double>(x.size()), std::vector<double>(w.size()), out.dx, out.dw};
  std::vector<double> p(vocab);
  for (size_t i = 0; i < rows; ++i) {
    const int32_t target = h.targets.data<int32_t>()[i];
    if (target < 0) continue;
    double total = 0;
    for (size_t v = 0; v < vocab; ++v)
      total += std::exp(p[v] = std::inner_product(&x[i * c], &x[i * c] + c, &w[v * c], 0.0));
    out.loss += std::log(total) - p[static_cast<size_t>(target)];
    for (size_t v = 0; v < vocab; ++v) {
      const double d = scale * (std::exp(p[v]) / total - (v == static_cast<size_t>(target) ? 1 : 0));
      for (size_t k = 0; k < c; ++k) {
        const double of_x = d * w[v * c + k], of_w = d * x[i * c + k];
        out.dx[i * c + k] += of_x;
        out.dx_terms[i * c + k] += std::abs(of_x);
        out.dw[v * c + k] += of_w;
        out.dw_terms[v * c + k] += std::abs(of_w);
      }
    }
  }
  return out;
}
double worst(const Tensor& found, const std::vector<double>& exact, const std::vector<double>& terms) {
  const std::vector<double> y = host_values(found);
  double max_error = 0;
  for (size_t i = 0; i < exact.size(); ++i)
    max_error = std::max(max_error, std::abs(y[i] - exact[i]) / std::max(terms[i], 1e-30));
  return max_error;
}

// GPT-2's vocabulary: a row of logits has 12 full blocks of 4,096 and a partial one, and the contributions of later row
// blocks to the weight's gradient (4.6 MB in float32) are computed in slices of 4 MB, the last of which is partial.
// There are three row blocks, the last one with only 67 rows.
TEST(Head, LargeVocabulariesMatchReferenceLoops) {
  for (const DType dtype : kDTypes)
    for (const bool fused : {true, false}) {
      SCOPED_TRACE(std::string(to_string(dtype)) + (fused ? " fused" : " full logits"));
      const double bound = dtype == DType::float64 ? 1e-13 : dtype == DType::float32 ? 5e-6 : 2e-2;
      Head h({fused ? 67 : 66, 23, 50257}, dtype, accum_dtype(dtype));
      const PlainHead expected = reference_head(h, 0.3);
      const Loss loss = fused ? h.fused() : h.unfused();
      EXPECT_NEAR(loss.loss_sum, expected.loss, 0.1 * bound * expected.loss);
      backward(loss.mean);
      EXPECT_LE(worst(h.x.grad(), expected.dx, expected.dx_terms), bound);
      EXPECT_LE(worst(h.w.grad(), expected.dw, expected.dw_terms), bound);
    }
}

TEST(Head, GradientsScaleWithSeed) {
  for (const DType dtype : {DType::float32, DType::float64}) {
    Head a(kSizes[1], dtype, dtype), b(kSizes[1], dtype, dtype);
    const auto minus_four = [](size_t) { return -4; };  // a power of two: no rounding
    backward(a.fused().mean, {.seed = made({}, DType::float64, a.arena, minus_four)});
    backward(b.fused(-1.2).mean);
    for (size_t i = 0; i < 2; ++i) {  // zeros may differ in sign
      EXPECT_EQ(a.gradients()[i].describe(), b.gradients()[i].describe());
      EXPECT_EQ(host_values(a.gradients()[i]), host_values(b.gradients()[i]));
    }
  }
}

TEST(Head, NoGradComputesOnlyLoss) {
  Head a(kSizes[0], DType::float32, DType::float32);
  const double expected = a.unfused().loss_sum;
  const NoGrad no_grad;
  a.w.grad();
  const int64_t before = a.arena->total().live;
  const Loss loss = a.fused();
  EXPECT_EQ(loss.loss_sum, expected);
  EXPECT_FALSE(loss.mean.requires_grad());
  EXPECT_EQ(a.arena->total().live, before + 8);
}

// Gradients of only one operand.
TEST(Head, ComputesOnlyRequestedGradients) {
  Head a(kSizes[0], DType::float32, DType::float32), b(kSizes[0], DType::float32, DType::float32);
  backward(a.unfused().mean);
  backward(linear_cross_entropy(b.x, Var(b.w.value()), b.targets, 0.3, nullptr, 1).mean);
  EXPECT_TRUE(bitwise_equal(a.x.grad(), b.x.grad()));
  backward(linear_cross_entropy(Var(b.x.value()), b.w, b.targets, 0.3, nullptr, 1).mean);
  EXPECT_TRUE(bitwise_equal(a.w.grad(), b.w.grad()));
}

// Precomputed values in the parameter's buffer are neither visible nor lost.
TEST(Head, PrecomputedGradientIsHiddenUntilBackward) {
  Head a(kSizes[0], DType::float32, DType::float32);
  {
    const Loss loss = a.fused();
    EXPECT_FALSE(a.w.grad().defined());
    EXPECT_EQ(a.told, 0);
    a.w.clear_grad();  // after the forward pass
    backward(loss.mean);
  }
  EXPECT_TRUE(a.w.grad().defined());
  EXPECT_EQ(a.told, 1);
  const Loss never_walked = a.fused();
  a.w.clear_grad();
  zero_missing_grad(a.w);
  for (const float v : a.w.grad().to_vector<float>()) EXPECT_EQ(v, 0);
}

// Every interleaving of passes of three micro-batches, deferred or not, is bitwise equal to sequential passes with
// gradients in the same order.
TEST(Head, InterleavedPassesMatchSequentialPasses) {
  const std::vector<std::vector<int>> orders = {{0, 1, 2}, {2, 1, 0}, {1, 2, 0}, {1, 0, 2}};
  for (const DType grad_dtype : {DType::float32, DType::bfloat16})
    for (const bool deferred : {false, true})
      for (const std::vector<int>& order : orders) {
        Head a(kSizes[0], DType::bfloat16, grad_dtype), b(kSizes[0], DType::bfloat16, grad_dtype);
        std::vector<Var> losses;
        for (int i = 0; i < 3; ++i) {
          a.sample_targets(i);
          losses.push_back(a.fused().mean);
        }
        DeferredWeightGrads later;
        for (const int i : order) {
          backward(losses[static_cast<size_t>(i)], {.seed = {}, .defer = deferred ? &later : nullptr});
          EXPECT_EQ(a.told > 0, !deferred);
        }
        later.run();
        EXPECT_EQ(a.told, 3);
        for (const int i : order) {
          b.sample_targets(i);
          backward(b.unfused().mean);
        }
        EXPECT_TRUE(bitwise_equal(a.gradients(), b.gradients())) << deferred;
      }
}

// A tied weight: its second use contributes a gradient in the same pass, and a separate loss contributes one between
// forward and backward.
TEST(Head, SupportsTiedWeights) {
  Head a(kSizes[0], DType::float32, DType::float32), b(kSizes[0], DType::float32, DType::float32);
  const Tensor ids = made({kSizes[0].rows}, DType::int32, a.arena,
                          [](size_t i) { return static_cast<int64_t>(i) * 5 % kSizes[0].vocab; });
  const auto pass = [&](Head& h, bool fused) {
    const Var x = embedding(ids, h.w);
    const Loss loss = fused ? linear_cross_entropy(x, h.w, h.targets, 0.3, nullptr, 1)
                            : cross_entropy(linear_by_rows(x, h.w, nullptr, 1), h.targets, 0.3);
    backward(sum(h.w));  // in between
    backward(loss.mean);
  };
  for (int microbatch = 0; microbatch < 2; ++microbatch) {
    pass(a, true);
    pass(b, false);
    EXPECT_TRUE(bitwise_equal(a.w.grad(), b.w.grad())) << microbatch;
  }
}

// A weight without a buffer until its gradient arrives, and a weight that is the result of an op.
TEST(Head, SupportsNonLeafWeights) {
  Head a(kSizes[0], DType::bfloat16, DType::float32), b(kSizes[0], DType::bfloat16, DType::float32);
  provide_grad(a.w,
               [&] { set_grad_buffer(a.w, Tensor::empty(a.w.shape(), DType::float32, a.arena, Category::gradients)); });
  backward(a.fused().mean);
  backward(b.unfused().mean);
  EXPECT_TRUE(bitwise_equal(a.w.grad(), b.w.grad()));
  a.w.clear_grad();
  b.w.clear_grad();
  backward(linear_cross_entropy(a.x, scale(a.w, 2), a.targets, 0.3, nullptr, 1).mean);
  backward(cross_entropy(linear_by_rows(b.x, scale(b.w, 2), nullptr, 1), b.targets, 0.3).mean);
  EXPECT_TRUE(bitwise_equal(a.w.grad(), b.w.grad()));
}

TEST(Head, RejectsMismatchedArguments) {
  Head a(kSizes[0], DType::float32, DType::float32);
  const auto refused = [&] { return error_message([&] { a.fused(); }); };
  a.targets.data<int32_t>()[90] = 70;  // in the last block
  EXPECT_EQ(refused(), "[cross_entropy] target 70 of row 90 is outside [0, 70)");
  a.targets = a.targets.narrow(0, 0, 95);
  EXPECT_EQ(refused(),
            "[linear_cross_entropy] x is float32 (96, 24), w is float32 (70, 24), targets are int32 (95); expected "
            "(N, C), (V, C) and int32 (N)");
}

// A step stores one block of logits and, if the parameter's buffer is free, no separate weight gradient.
TEST(Head, StoresOneBlockOfLogits) {
  const Sizes sizes{1024, 64, 2048};
  Head a(sizes, DType::float32, DType::float32);
  const int64_t logits = sizes.rows * sizes.vocab * 4, weight = sizes.vocab * sizes.channels * 4,
                hidden = sizes.rows * sizes.channels * 4;
  for (int microbatch = 0; microbatch < 2; ++microbatch) {
    backward(a.fused(0.3, logits / 8).mean);  // the library compiles its kernels
    a.w.clear_grad();
    const int64_t before = a.arena->total().live;
    a.arena->reset_peaks();
    const Loss loss = a.fused(0.3, logits / 8);
    // In addition to the block: the gradient of x, of the block's rows, the weight gradient's buffer, and small arrays.
    EXPECT_LT(a.arena->total().peak, before + logits / 8 + 2 * hidden + weight + 65536);
    EXPECT_LT(a.arena->total().live, before + hidden + 4096);
    a.arena->reset_peaks();
    backward(loss.mean);
    EXPECT_LT(a.arena->total().peak, before + 2 * hidden + 65536);
  }
}

TEST(Head, RowBlocksHaveEqualSizesIfPossible) {
  const ArenaPtr arena = make_arena();
  const auto blocks = [&](int64_t rows, int64_t vocab, DType dtype) {
    const auto column = [&](int64_t length) { return Tensor::empty({length, 1}, dtype, arena); };
    const RowBlocks b = row_blocks(column(rows), column(vocab), 1 << 20);
    int64_t seen = 0;
    b.for_each([&](int64_t at, int64_t n) {
      EXPECT_EQ(at, seen);
      EXPECT_LE(n, b.block);
      seen += n;
    });
    EXPECT_EQ(seen, rows);
    return b.block;
  };
  EXPECT_EQ(blocks(1024, 1000, DType::float32), 256);   // 262 would fit
  EXPECT_EQ(blocks(1024, 1000, DType::bfloat16), 512);  // 524 would fit
  EXPECT_EQ(blocks(1000, 1000, DType::float32), 250);
  EXPECT_EQ(blocks(1020, 1000, DType::float32), 255);
  EXPECT_EQ(blocks(1009, 1000, DType::float32), 253);  // a prime
  EXPECT_EQ(blocks(262, 1000, DType::float32), 262);
  EXPECT_EQ(blocks(128, 1000000, DType::float32), 32);
}

// Mixture-of-experts ops beyond the op table: independence of rows, router losses, errors.

TEST(ExpertOps, RowsAreBitwiseIndependentOfOtherRows) {
  const ArenaPtr arena = make_arena();
  for (const DType dtype : {DType::float64, DType::float32, DType::bfloat16}) {
    const Tensor x = random_tensor({97, 70}, dtype, "x"), w = random_tensor({45, 70}, dtype, "w"),
                 dy = random_tensor({97, 45}, dtype, "dy");
    const Tensor y = grouped_linear(x, {{w, 97}}), dx = grouped_linear_input_grad(dy, {{w, 97}});
    for (const auto& [first, count] : {std::pair<int64_t, int64_t>{0, 1}, {96, 1}, {13, 50}, {40, 7}, {20, 0}}) {
      const std::vector<GemmGroup> one{{w, count}};
      EXPECT_TRUE(bitwise_equal(grouped_linear(x.narrow(0, first, count), one), y.narrow(0, first, count)));
      EXPECT_TRUE(
          bitwise_equal(grouped_linear_input_grad(dy.narrow(0, first, count), one), dx.narrow(0, first, count)));
    }
    const Tensor dw = random_tensor({45, 70}, accum_dtype(dtype), "before");
    grouped_linear_weight_grads({{dw, 0}}, dy.narrow(0, 5, 0), x.narrow(0, 5, 0));
    EXPECT_EQ(dw.to(DType::float64).to_vector<double>(), std::vector<double>(45 * 70, 0.0));  // the sum over no rows
  }
}

// Values and gradients of two passes over a trained weight, a frozen one, and the result of an op; rows from two
// sources.
struct Passes {
  std::vector<Tensor> found;
  int hooks = 0;
};
enum class How : uint8_t { at_once, later, one_by_one };

Passes two_passes(DType dtype, How how) {
  const std::vector<int64_t> counts{3, 0, 5, 1, 4, 0};
  const auto weight = [&](const std::string& name) { return random_tensor({7, 20}, dtype, name); };
  Var trained(weight("a"), true), below(weight("c"), true);
  Passes out;
  trained.on_grad([&] { ++out.hooks; });
  for (const char* const pass : {"first", "second"}) {
    const Var x(random_tensor({13, 20}, dtype, pass), true);
    const std::vector<Var> w{trained, Var(weight("b")), scale(below, 0.5)};
    Var y;
    if (how == How::one_by_one) {  // backward visits nodes from newest to oldest
      std::vector<Var> parts = split_rows(x, counts);
      for (const size_t first : {size_t{3}, size_t{0}})
        for (size_t i = first; i < first + 3; ++i) parts[i] = grouped_linear(parts[i], {w[i - first]}, {counts[i]});
      y = join_rows(parts);
    } else {
      y = grouped_linear(x, w, counts);
    }
    DeferredWeightGrads later;
    backward(y, {.seed = random_tensor({13, 7}, dtype, "dy"), .defer = how == How::later ? &later : nullptr});
    if (how == How::later) {
      EXPECT_FALSE(later.empty());
      later.run();
    }
    out.found.insert(out.found.end(), {y.value(), x.grad()});
  }
  out.found.insert(out.found.end(), {trained.grad(), below.grad()});
  return out;
}

TEST(ExpertOps, GroupedGemmIsBitwiseEqualToSeparateGemms) {
  for (const DType dtype : {DType::float64, DType::float32, DType::bfloat16}) {
    const Passes expected = two_passes(dtype, How::one_by_one);
    for (const How how : {How::at_once, How::later}) {
      const Passes passes = two_passes(dtype, how);
      EXPECT_EQ(passes.hooks, 2);
      EXPECT_TRUE(bitwise_equal(passes.found, expected.found)) << to_string(dtype);
    }
  }
}

// Recomputes the auxiliary losses of route_backward().
double router_losses(const std::vector<double>& logits, int64_t experts, const RouteOptions& o,
                     const std::vector<int32_t>& chosen) {
  const int64_t n = std::ssize(logits) / experts, length = n / o.sequences;
  double loss = 0;
  for (int64_t s = 0; s < o.sequences; ++s) {
    std::vector<double> choices(static_cast<size_t>(experts), 0), mean(choices);
    const auto tokens = static_cast<double>(length);
    for (int64_t t = s * length; t < (s + 1) * length; ++t) {
      const double* const row = logits.data() + t * experts;
      double sum = 0;
      for (int64_t e = 0; e < experts; ++e) sum += std::exp(row[e]);
      loss += o.z * std::log(sum) * std::log(sum) / tokens;
      for (size_t e = 0; e < mean.size(); ++e) mean[e] += std::exp(row[e]) / sum / tokens;
      const int32_t* const own = chosen.data() + t * o.per_token;
      for (int64_t j = 0; j < o.per_token; ++j) choices[static_cast<size_t>(own[j])] += 1;
    }
    for (size_t e = 0; e < mean.size(); ++e)
      loss +=
          o.balance * static_cast<double>(experts) * choices[e] / static_cast<double>(o.per_token) / tokens * mean[e];
  }
  return loss;
}

TEST(ExpertOps, RouterLossGradientsMatchFiniteDifferences) {
  const int64_t experts = 5;
  const Tensor logits = random_tensor({12, experts}, DType::float64, "logits");
  const RouteOptions o{.per_token = 2, .sequences = 3, .capacity = 1, .balance = 0.7, .z = 0.3};
  const Routed routed = route(logits, o);
  EXPECT_GT(routed.dropped, 0);
  const Tensor zero = Tensor::zeros({12, 2}, DType::float64, make_arena());
  const std::vector<double> gradient = route_backward(zero, logits, routed, o).to_vector<double>();
  std::vector<double> values = logits.to_vector<double>();
  const std::vector<int32_t> chosen = routed.chosen.to_vector<int32_t>();
  for (size_t i = 0; i < values.size(); ++i) {
    const double before = values[i];
    double change = 0;
    for (const int side : {-1, 1}) {
      values[i] = before + side * 1e-6;
      change += side * router_losses(values, experts, o, chosen);
    }
    values[i] = before;
    EXPECT_NEAR(gradient[i], change / 2e-6, 1e-8);
  }
}

TEST(ExpertOps, RejectsMismatchedArguments) {
  const Tensor logits = random_tensor({6, 3}, DType::float32, "logits");
  EXPECT_THROW(route(logits, {.per_token = 4}), Error);
  EXPECT_THROW(route(logits, {.per_token = 1, .sequences = 4}), Error);
  const Tensor w = random_tensor({4, 3}, DType::float32, "w");
  EXPECT_THROW(grouped_linear(logits, {{random_tensor({3, 2}, DType::float32, "w"), 6}}), Error);
  EXPECT_THROW(grouped_linear(logits, {{w.to(DType::float64), 6}}), Error);
  EXPECT_THROW(grouped_linear(logits, {{w, 5}}), Error);
  EXPECT_THROW(grouped_linear(logits, std::vector<GemmGroup>()), Error);
  EXPECT_THROW(grouped_linear(Var(logits), {Var(w), Var(w)}, {1, 2, 3}), Error);
}

}  // namespace
}  // namespace tessera
