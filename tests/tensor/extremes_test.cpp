// Row ops and attention with extreme inputs, for which sums of exponentials or squares fail first: values far apart
// (also between blocks), all equal, rows of one value, extremes at the ends; compared with plain float64 loops on every
// device.

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <functional>
#include <numeric>
#include <vector>

#include "tensor/ops/attention/attention.h"
#include "tensor/ops/cross_entropy.h"
#include "tensor/ops/norm.h"
#include "tensor/ops/softmax.h"
#include "tests/support/gpu.h"
#include "tests/support/one_thread.h"
#include "tests/support/plain_attention.h"
#include "tests/support/tensors.h"

namespace tessera {
namespace {

using namespace test;

using Values = std::vector<double>;

double error_bound(DType dtype) { return dtype == DType::float64 ? 1e-11 : dtype == DType::float32 ? 2e-4 : 2e-2; }

// Rows of n values that bfloat16 represents exactly; values at the ends and in the middle are far from the others.
Values extreme_rows(int64_t n) {
  const Philox random = Philox::named(static_cast<uint64_t>(n), "rows");
  Values out;
  uint64_t at = 0;
  const auto row = [&](const std::function<double(int64_t)>& f) {
    for (int64_t j = 0; j < n; ++j) out.push_back(nearest_bf16(f(j)));
  };
  const auto normal = [&](int64_t) { return static_cast<double>(random.normal(at++)); };
  row(normal);
  for (const double all : {0.0, 1.0, -90.0, 1000.0}) row([&](int64_t) { return all; });
  for (const int64_t one : {int64_t{0}, n / 2, n - 1})
    for (const double by : {95.0, 1000.0, -1000.0}) row([&](int64_t j) { return normal(j) + (j == one ? by : 0); });
  row([&](int64_t j) { return normal(j) + (j < n / 2 ? -500 : 500); });
  row([&](int64_t j) { return normal(j) + (j < n / 2 ? 500 : -500); });
  row([&](int64_t j) { return 100 * static_cast<double>(j >> 10) + normal(j); });  // increases from block to block
  row([&](int64_t j) { return -100 * static_cast<double>(j >> 10) + normal(j); });
  row([&](int64_t j) { return 20 * normal(j); });
  return out;
}

struct Softmaxed {
  Values p, log_p, lse;
};
Softmaxed soften(const Values& x, int64_t n) {
  Softmaxed y;
  for (auto row = x.begin(); row != x.end(); row += n) {
    const double largest = *std::max_element(row, row + n);
    double sum = 0;
    for (auto v = row; v != row + n; ++v) sum += std::exp(*v - largest);
    y.lse.push_back(largest + std::log(sum));
    for (auto v = row; v != row + n; ++v) {
      y.log_p.push_back(*v - y.lse.back());
      y.p.push_back(std::exp(y.log_p.back()));
    }
  }
  return y;
}

Values normals(int64_t count, const char* name) {
  const Philox random = Philox::named(5, name);
  const auto normal = [&](size_t i) { return nearest_bf16(random.normal(i)); };
  return host_values(made({count}, DType::float64, make_arena(), normal));
}

Tensor tensor(const Values& values, const Shape& shape, DType dtype, const ArenaPtr& arena) {
  return Tensor::of<double>(values, shape, make_arena()).to(dtype).to(arena);
}

void expect_softmax(int64_t n, DType dtype, const ArenaPtr& arena) {
  const Values x = extreme_rows(n), dy = normals(std::ssize(x), "dy");
  const Shape shape{std::ssize(x) / n, n};
  const Softmaxed expected = soften(x, n);
  const Tensor in = tensor(x, shape, dtype, arena), out = softmax(in), log = log_softmax(in);
  EXPECT_LE(row_difference(host_values(out), expected.p, n, 1), error_bound(dtype)) << n;
  EXPECT_LE(row_difference(host_values(log), expected.log_p, n, 1e-3), error_bound(dtype)) << n;
  // Expected gradients use the stored forward results.
  const Values p = host_values(out), log_p = host_values(log);
  Values dx, log_dx;
  for (int64_t row = 0; row < std::ssize(x); row += n) {
    const double *const by = dy.data() + row, *const from = p.data() + row, *const log_from = log_p.data() + row;
    const double dot = std::inner_product(by, by + n, from, 0.0), sum = std::accumulate(by, by + n, 0.0);
    for (int64_t i = 0; i < n; ++i) {
      dx.push_back(from[i] * (by[i] - dot));
      log_dx.push_back(by[i] - std::exp(log_from[i]) * sum);
    }
  }
  const Tensor seed = tensor(dy, shape, dtype, arena);
  EXPECT_LE(row_difference(host_values(softmax_backward(seed, out)), dx, n, 1), error_bound(dtype)) << n;
  EXPECT_LE(row_difference(host_values(log_softmax_backward(seed, log)), log_dx, n, 1), error_bound(dtype)) << n;
}

// Checks losses and gradients of every implementation, with targets at the ends and in the middle of rows and with
// ignored ones.
void expect_cross_entropy(int64_t n, DType dtype, const ArenaPtr& arena) {
  const Values x = extreme_rows(n);
  const int64_t rows = std::ssize(x) / n;
  const Softmaxed expected = soften(x, n);
  std::vector<int32_t> targets;
  double loss = 0;
  Values dx = expected.p;
  for (int64_t i = 0; i < rows; ++i) {
    const int64_t target = i % 5 == 4 ? -1 : i % 5 == 3 ? (i * 7) % n : i % 3 == 0 ? 0 : i % 3 == 1 ? n - 1 : n / 2;
    targets.push_back(static_cast<int32_t>(target));
    if (target < 0)
      std::fill_n(dx.begin() + i * n, n, 0.0);
    else {
      loss -= expected.log_p[static_cast<size_t>(i * n + target)];
      dx[static_cast<size_t>(i * n + target)] -= 1;
    }
  }
  for (double& d : dx) d *= 0.5;
  const Shape shape{rows, n};
  const Tensor wanted = Tensor::of<int32_t>(targets, {rows}, arena);
  const double bound = error_bound(dtype), wide = dtype == DType::bfloat16 ? 2e-4 : bound;
  const Tensor all = tensor(x, shape, dtype, arena), row_maxima = row_max(all);
  const CrossEntropy found = cross_entropy(all, wanted);
  EXPECT_NEAR(double{found.loss_sum}, loss, wide * (loss + 1)) << n;
  EXPECT_LE(row_difference(host_values(found.lse), expected.lse, 1, 1e-3), wide) << n;
  const Tensor back = cross_entropy_backward(all.clone(), wanted, found.lse, 0.5);
  EXPECT_LE(row_difference(host_values(back), dx, n, 1), bound) << n;
  Tensor logits = all.clone();
  EXPECT_NEAR(double{cross_entropy_in_place(logits, wanted, 0.5).loss_sum}, loss, wide * (loss + 1)) << n;
  EXPECT_LE(row_difference(host_values(logits), dx, n, 1), bound) << n;
  // Combined from the partial results of shards.
  const CrossEntropy joined =
      joined_cross_entropy(row_maxima, row_sum_exp(all, row_maxima), target_logits(all, wanted, {}), wanted);
  EXPECT_NEAR(double{joined.loss_sum}, loss, wide * (loss + 1)) << n;
}

void expect_norm(int64_t n, DType dtype, const ArenaPtr& arena) {
  for (const bool center : {true, false}) {
    const Values x = extreme_rows(n), gamma = normals(n, "gamma"), beta = normals(n, "beta"),
                 dy = normals(std::ssize(x), "dy");
    // The output of a row of equal values consists only of the rounding error of its mean.
    const double bound = 5 * error_bound(dtype), of_mean = dtype == DType::float64 ? 0x1p-49 : 0x1p-20;
    Values y, dx, terms;
    const auto width = static_cast<double>(n);
    for (size_t row = 0; row < x.size(); row += static_cast<size_t>(n)) {
      const double* const own = x.data() + row;
      const double mean = center ? std::accumulate(own, own + n, 0.0) / width : 0;
      double square = 0, sum = 0, dot = 0;
      for (int64_t j = 0; j < n; ++j) square += std::pow(own[j] - mean, 2) / width;
      const double rstd = 1 / std::sqrt(square + 1e-5);
      const auto normed = [&](size_t j) { return (x[row + j] - mean) * rstd; };
      for (size_t j = 0; j < static_cast<size_t>(n); ++j) {
        y.push_back(normed(j) * gamma[j] + (center ? beta[j] : 0));
        terms.push_back(std::abs(y.back()) + of_mean / bound * std::abs(mean) * rstd);
        sum += center ? dy[row + j] * gamma[j] / width : 0;
        dot += dy[row + j] * gamma[j] * normed(j) / width;
      }
      for (size_t j = 0; j < static_cast<size_t>(n); ++j)
        dx.push_back((dy[row + j] * gamma[j] - sum - normed(j) * dot) * rstd);
    }
    const Shape shape{std::ssize(x) / n, n}, channels{n};
    const Tensor in = tensor(x, shape, dtype, arena), by = tensor(gamma, channels, dtype, arena);
    const Normed found = norm(in, by, center ? tensor(beta, channels, dtype, arena) : Tensor(), {.center = center});
    EXPECT_LE(row_difference(host_values(found.y), y, n, 0.05, terms), bound) << n << (center ? "" : " by squares");
    const Tensor back = norm_backward(tensor(dy, shape, dtype, arena), in, by, found, Tensor());
    EXPECT_LE(row_difference(host_values(back), dx, n, 0.05), bound) << n << (center ? "" : " by squares");
  }
}

void expect_rows(const ArenaPtr& arena, const std::vector<int64_t>& sizes) {
  for (const DType dtype : test::floating(arena))
    for (const int64_t n : sizes) {
      SCOPED_TRACE(to_string(dtype));
      expect_softmax(n, dtype, arena);
      expect_cross_entropy(n, dtype, arena);
      if (n < 4096) expect_norm(n, dtype, arena);
    }
}

using ExtremeRows = test::OneThread;

TEST_F(ExtremeRows, MatchReferenceLoops) {
  expect_rows(make_arena(), {1, 2, 3, 15, 16, 17, 64, 65, 1023, 1025, 4095, 4096, 4097, 8193});
}

using ExtremeRowsGpu = test::OnGpu;

TEST_F(ExtremeRowsGpu, MatchReferenceLoops) { expect_rows(arena, {1, 2, 31, 33, 129, 1025, 4097}); }

// The head computes its loss in row blocks, of which the last has one row, or in blocks of one row each.
TEST_F(ExtremeRows, HeadInRowBlocksMatchesReferenceLoops) {
  constexpr int64_t kRows = 7, kChannels = 3, kVocab = 4099;
  const ArenaPtr arena = make_arena();
  Values x = normals(kRows * kChannels, "x"), w = normals(kVocab * kChannels, "w");
  for (size_t i = 0; i < x.size(); i += kChannels) x[i] = 8;
  for (size_t j = 0; j < w.size(); j += kChannels) w[j] = j / kChannels % 5 == 0 ? 16 : j / kChannels < 4096 ? -16 : 32;
  Values logits;
  for (size_t i = 0; i < x.size(); i += kChannels)
    for (size_t j = 0; j < w.size(); j += kChannels)
      logits.push_back(x[i] * w[j] + x[i + 1] * w[j + 1] + x[i + 2] * w[j + 2]);
  const Softmaxed soft = soften(logits, kVocab);
  std::vector<int32_t> targets;
  double loss = 0;
  Values d = soft.p, dx(x.size()), dw(w.size());
  for (size_t i = 0; i < kRows; ++i) {
    targets.push_back(static_cast<int32_t>(i % 2 == 0 ? kVocab - 1 : 5 * i));
    const size_t at = i * kVocab + static_cast<size_t>(targets.back());
    loss -= soft.log_p[at];
    d[at] -= 1;
    for (size_t j = 0; j < kVocab; ++j)
      for (size_t c = 0; c < kChannels; ++c) {
        dx[i * kChannels + c] += d[i * kVocab + j] * w[j * kChannels + c];
        dw[j * kChannels + c] += d[i * kVocab + j] * x[i * kChannels + c];
      }
  }
  for (const DType dtype : {DType::float64, DType::float32})
    for (const int64_t block : {1, 2, 3, 7}) {
      const Tensor in = tensor(x, {kRows, kChannels}, dtype, arena),
                   table = tensor(w, {kVocab, kChannels}, dtype, arena);
      Tensor gx = in.make(in.shape()), gw = table.make(table.shape());
      gw.fill(0);
      const LinearCrossEntropy found = linear_cross_entropy(in, table, Tensor::of<int32_t>(targets, {kRows}, arena), 1,
                                                            &gx, &gw, {.rows = kRows, .block = block});
      EXPECT_NEAR(found.loss_sum, loss, error_bound(dtype) * loss) << block;
      EXPECT_LE(row_difference(host_values(gx), dx, kChannels, 0.5), error_bound(dtype)) << block;
      EXPECT_LE(row_difference(host_values(gw), dw, kChannels, 0.5), error_bound(dtype)) << block;
    }
}

// Attention with scores that are far apart between blocks of keys or all equal, with blocks of one key, and for the
// first and the last query; compared with plain float64 loops.

// Differences of scores near 200 are less precise.
double attention_bound(DType dtype) { return dtype == DType::float64 ? 1e-11 : dtype == DType::float32 ? 5e-4 : 2e-2; }

void expect_matches_reference(const AttentionShape& s, Extreme extreme, DType dtype, const ArenaPtr& arena) {
  const AttentionValues x = sample_extreme(s, extreme, static_cast<uint64_t>(s.tk));
  const PlainAttention expected = reference_attention(s, x);
  const Shape queries{s.b, s.tq, s.h, s.d}, keys{s.b, s.tk, s.k, s.d};
  const Tensor q = tensor(x.q, queries, dtype, arena), k = tensor(x.k, keys, dtype, arena),
               v = tensor(x.v, keys, dtype, arena), dout = tensor(x.dout, queries, dtype, arena);
  const AttentionOptions options{.causal = s.causal};
  const AttentionResult found = attention(q, k, v, options);
  Tensor dq = q.make(queries), dk = q.make(keys), dv = q.make(keys);
  attention_backward(dout, q, k, v, found, options, dq, dk, dv);
  const double bound = attention_bound(dtype);
  SCOPED_TRACE(testing::Message() << static_cast<int>(extreme) << ", " << q.describe() << " of " << k.describe()
                                  << (s.causal ? "" : ", not causal"));
  EXPECT_LE(row_difference(host_values(found.out), expected.out, s.d, 0.05), bound);
  EXPECT_LE(row_difference(host_values(found.lse), expected.lse, 1, 0.01), bound);
  EXPECT_LE(row_difference(host_values(dq), expected.dq, s.d, 0.01, expected.dq_terms), 6 * bound);
  EXPECT_LE(row_difference(host_values(dk), expected.dk, s.d, 0.01, expected.dk_terms), 6 * bound);
  EXPECT_LE(row_difference(host_values(dv), expected.dv, s.d, 0.5), bound);
}

void expect_matches_reference_in(const std::vector<DType>& dtypes, const std::vector<AttentionShape>& shapes,
                                 const ArenaPtr& arena) {
  for (const DType dtype : dtypes)
    for (const AttentionShape& s : shapes)
      for (const Extreme extreme : kExtremes) expect_matches_reference(s, extreme, dtype, arena);
}

using AttentionExtremeInputs = test::OneThread;

TEST_F(AttentionExtremeInputs, MatchReferenceLoops) {
  std::vector<AttentionShape> shapes;
  for (const int64_t tokens : {1, 2, 16, 63, 64, 65, 127, 128, 129, 193}) {
    shapes.push_back({.tq = tokens, .tk = tokens, .d = 8});
    shapes.push_back({.b = 2, .tq = tokens, .tk = tokens, .h = 2, .d = 5, .causal = false});
  }
  for (const int64_t queries : {1, 7, 16, 17, 65})  // the last queries, as in decoding
    shapes.push_back({.tq = queries, .tk = 130, .h = 4, .k = 2, .d = 16});
  for (const int64_t keys : {1, 16, 65})  // a ring attention tile: all queries, fewer keys
    shapes.push_back({.tq = 130, .tk = keys, .h = 4, .k = 2, .d = 16, .causal = false});
  expect_matches_reference_in({DType::float64, DType::float32, DType::bfloat16}, shapes, make_arena());
}

using AttentionExtremeInputsGpu = test::OnGpu;

TEST_F(AttentionExtremeInputsGpu, PlainKernelsMatchReferenceLoops) {
  expect_matches_reference_in(test::floating(arena),
                              {{.tq = 1, .tk = 1, .d = 8},
                               {.tq = 65, .tk = 65, .d = 8},
                               {.tq = 17, .tk = 129, .h = 2, .d = 5},
                               {.tq = 64, .tk = 65, .d = 4, .causal = false},
                               {.tq = 130, .tk = 17, .h = 2, .d = 5, .causal = false}},
                              arena);
}

TEST_F(AttentionExtremeInputsGpu, TensorCoresMatchReferenceLoops) {
  expect_matches_reference_in({DType::bfloat16},
                              {{.tq = 1, .tk = 1, .d = 64},
                               {.tq = 65, .tk = 65, .d = 64},
                               {.tq = 3, .tk = 130, .h = 2, .d = 64},
                               {.tq = 64, .tk = 129, .d = 64, .causal = false},
                               {.tq = 129, .tk = 64, .h = 2, .d = 64, .causal = false},
                               {.tq = 66, .tk = 66, .d = 128}},
                              arena);
}

// Checks tiles of keys that are computed separately and merged by their log-sum-exp, in any order; their outputs have
// the accumulation dtype or are rounded to the operands' dtype.
void expect_merged(DType dtype, bool rounded, Extreme extreme, std::vector<int64_t> cuts, const ArenaPtr& arena) {
  const AttentionShape s{.b = 2, .tq = 16, .tk = 96, .h = 2, .k = 2, .d = 8, .causal = false};
  const AttentionValues x = sample_extreme(s, extreme, 7);
  const Shape queries{s.b, s.tq, s.h, s.d}, keys{s.b, s.tk, s.k, s.d};
  const Tensor q = tensor(x.q, queries, dtype, arena), k = tensor(x.k, keys, dtype, arena),
               v = tensor(x.v, keys, dtype, arena);
  const DType wide = accum_dtype(dtype), out_dtype = rounded ? dtype : wide;
  const AttentionResult full{q.make(queries, out_dtype), q.make({s.b, s.h, s.tq + 5}, wide).narrow(2, 3, s.tq)};
  Tensor out = full.out, lse = full.lse;
  out.fill(0);
  lse.fill(-INFINITY);  // log-sum-exp over no keys
  for (size_t i = 0; i + 1 < cuts.size(); ++i) {
    const int64_t begin = std::min(cuts[i], cuts[i + 1]), count = std::abs(cuts[i + 1] - cuts[i]);
    const AttentionResult part{q.make(queries, out_dtype), q.make({s.b, s.h, s.tq}, wide)};
    attention_into(q, k.narrow(1, begin, count), v.narrow(1, begin, count), {.causal = false}, part);
    merge_attention(full, part);
  }
  const PlainAttention expected = reference_attention(s, x);
  EXPECT_LE(row_difference(host_values(out), expected.out, s.d, 0.05), attention_bound(dtype));
  EXPECT_LE(row_difference(host_values(lse), expected.lse, 1, 0.01), attention_bound(dtype));
}

void expect_merged(const ArenaPtr& arena) {
  for (const Extreme extreme : kExtremes)
    for (std::vector<int64_t> cuts :
         {std::vector<int64_t>{0, 1, 96}, {0, 16, 32, 48, 64, 80, 96}, {0, 64, 95, 96}, {0, 1, 2, 3, 96}})
      for (const bool backwards : {false, true}) {
        if (backwards) std::reverse(cuts.begin(), cuts.end());
        for (const DType dtype : test::floating(arena)) expect_merged(dtype, false, extreme, cuts, arena);
        expect_merged(DType::bfloat16, true, extreme, cuts, arena);
      }
}

TEST_F(AttentionExtremeInputs, MergedTilesMatchReferenceLoops) { expect_merged(make_arena()); }
TEST_F(AttentionExtremeInputsGpu, MergedTilesMatchReferenceLoops) { expect_merged(arena); }

// Each kernel exactly once, for tools that check every memory access: tensor-core and plain kernels, with and without
// dropout and document starts.
using AttentionGpu = test::OnGpu;
TEST_F(AttentionGpu, SmallShapesMatchReferenceLoops) {
  expect_matches_reference({.tq = 33, .tk = 33, .h = 2, .d = 64}, Extreme::apart, DType::bfloat16, arena);
  expect_matches_reference({.tq = 20, .tk = 17, .d = 128, .causal = false}, Extreme::apart, DType::bfloat16, arena);
  expect_matches_reference({.tq = 20, .tk = 33, .d = 20}, Extreme::apart, DType::float32, arena);
  expect_merged(DType::bfloat16, true, Extreme::apart, {0, 64, 96}, arena);
  for (const int64_t d : {20, 64}) {
    const AttentionShape s{.tq = 33, .tk = 33, .d = d};
    const AttentionValues x = sample_extreme(s, Extreme::zero, 3);
    const auto start = [](size_t i) { return i < 20 ? 0 : 18; };
    const AttentionOptions o{
        .dropout = 0.5, .random = Philox(4), .starts = made({1, 33}, DType::int32, make_arena(), start)};
    const auto attend = [&](const ArenaPtr& on) {
      const auto of = [&](const Values& values) { return tensor(values, {1, 33, 1, d}, DType::bfloat16, on); };
      AttentionOptions there = o;
      there.starts = o.starts.to(on);
      const Tensor q = of(x.q), k = of(x.k), v = of(x.v);
      const AttentionResult found = attention(q, k, v, there);
      Tensor dq = q.make(q.shape()), dk = q.make(q.shape()), dv = q.make(q.shape());
      attention_backward(of(x.dout), q, k, v, found, there, dq, dk, dv);
      return std::vector{host_values(found.out), host_values(dk), host_values(dv)};
    };
    const auto here = attend(make_arena()), there = attend(arena);
    for (size_t i = 0; i < here.size(); ++i) EXPECT_LE(row_difference(there[i], here[i], d, 1.0), 0x1p-6) << d << i;
  }
}

}  // namespace
}  // namespace tessera
