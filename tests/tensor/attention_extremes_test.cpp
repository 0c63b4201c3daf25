// Attention where a softmax goes wrong first: scores that are far apart from one block of keys to the next, all equal,
// blocks of one key, the first and the last query; against plain loops in float64.

#include <cstdlib>

#include "tensor/ops/attention/attention.h"
#include "tests/support/gpu.h"
#include "tests/support/one_thread.h"
#include "tests/support/plain_attention.h"
#include "tests/support/tensors.h"

namespace tessera {
namespace {

using test::AttentionShape;
using test::AttentionValues;
using test::Extreme;
using test::kExtremes;
using test::numbers;
using test::PlainAttention;
using test::row_difference;

// Scores of 200 have that much less of a float to say by how much they differ.
double bound_of(DType dtype) { return dtype == DType::float64 ? 1e-11 : dtype == DType::float32 ? 5e-4 : 2e-2; }

void expect_plain(const AttentionShape& s, Extreme extreme, DType dtype, const ArenaPtr& arena) {
  const AttentionValues x = draw_extreme(s, extreme, static_cast<uint64_t>(s.tk));
  const PlainAttention expected = attend_plainly(s, x);
  const Shape queries{s.b, s.tq, s.h, s.d}, keys{s.b, s.tk, s.k, s.d};
  const auto tensor = [&](const std::vector<double>& values, const Shape& shape) {
    return Tensor::of<double>(values, shape, make_arena()).to(dtype).to(arena);
  };
  const Tensor q = tensor(x.q, queries), k = tensor(x.k, keys), v = tensor(x.v, keys), dout = tensor(x.dout, queries);
  const AttentionOptions options{.causal = s.causal};
  const Attended found = attention(q, k, v, options);
  Tensor dq = q.make(queries), dk = q.make(keys), dv = q.make(keys);
  attention_backward(dout, q, k, v, found, options, dq, dk, dv);
  const double bound = bound_of(dtype);
  const std::string what = std::to_string(static_cast<int>(extreme)) + " in " + std::string(name_of(dtype)) + ", " +
                           q.describe() + " of " + k.describe() + (s.causal ? "" : ", not causal");
  EXPECT_LE(row_difference(numbers(found.out), expected.out, s.d, 0.05), bound) << what;
  EXPECT_LE(row_difference(numbers(found.lse), expected.lse, 1, 0.01), bound) << what;
  EXPECT_LE(row_difference(numbers(dq), expected.dq, s.d, 0.01, expected.dq_terms), 6 * bound) << what;
  EXPECT_LE(row_difference(numbers(dk), expected.dk, s.d, 0.01, expected.dk_terms), 6 * bound) << what;
  EXPECT_LE(row_difference(numbers(dv), expected.dv, s.d, 0.5), bound) << what;
}

void expect_plain_in(const std::vector<DType>& dtypes, const std::vector<AttentionShape>& shapes,
                     const ArenaPtr& arena) {
  for (const DType dtype : dtypes)
    for (const AttentionShape& s : shapes)
      for (const Extreme extreme : kExtremes) expect_plain(s, extreme, dtype, arena);
}

using AttentionExtremes = test::OneThread;

TEST_F(AttentionExtremes, AreThoseOfPlainLoops) {
  std::vector<AttentionShape> shapes;
  for (const int64_t tokens : {1, 2, 16, 63, 64, 65, 127, 128, 129, 193}) {
    shapes.push_back({.tq = tokens, .tk = tokens, .d = 8});
    shapes.push_back({.b = 2, .tq = tokens, .tk = tokens, .h = 2, .d = 5, .causal = false});
  }
  for (const int64_t queries : {1, 7, 16, 17, 65})  // the last ones: as in decoding
    shapes.push_back({.tq = queries, .tk = 130, .h = 4, .k = 2, .d = 16});
  for (const int64_t keys : {1, 16, 65})  // a tile of a ring: all queries, and keys of which there are fewer
    shapes.push_back({.tq = 130, .tk = keys, .h = 4, .k = 2, .d = 16, .causal = false});
  expect_plain_in({DType::float64, DType::float32, DType::bfloat16}, shapes, make_arena());
}

using AttentionExtremesGpu = test::OnGpu;

TEST_F(AttentionExtremesGpu, OfPlainKernelsAreThoseOfPlainLoops) {
  expect_plain_in(test::floating(arena),
                  {{.tq = 1, .tk = 1, .d = 8},
                   {.tq = 65, .tk = 65, .d = 8},
                   {.tq = 17, .tk = 129, .h = 2, .d = 5},
                   {.tq = 64, .tk = 65, .d = 4, .causal = false},
                   {.tq = 130, .tk = 17, .h = 2, .d = 5, .causal = false}},
                  arena);
}

TEST_F(AttentionExtremesGpu, OfTensorCoresAreThoseOfPlainLoops) {
  expect_plain_in({DType::bfloat16},
                  {{.tq = 1, .tk = 1, .d = 64},
                   {.tq = 65, .tk = 65, .d = 64},
                   {.tq = 3, .tk = 130, .h = 2, .d = 64},
                   {.tq = 64, .tk = 129, .d = 64, .causal = false},
                   {.tq = 129, .tk = 64, .h = 2, .d = 64, .causal = false},
                   {.tq = 66, .tk = 66, .d = 128}},
                  arena);
}

// Tiles of keys that are computed apart and merged by their log-sum-exp, in any order: sums in their own dtype or
// rounded to the operands', whose log-sum-exp is part of a longer one.
void expect_merged(DType dtype, bool rounded, Extreme extreme, std::vector<int64_t> cuts, const ArenaPtr& arena) {
  const AttentionShape s{.b = 2, .tq = 16, .tk = 96, .h = 2, .k = 2, .d = 8, .causal = false};
  const AttentionValues x = draw_extreme(s, extreme, 7);
  const auto tensor = [&](const std::vector<double>& values, const Shape& shape) {
    return Tensor::of<double>(values, shape, make_arena()).to(dtype).to(arena);
  };
  const Shape queries{s.b, s.tq, s.h, s.d}, keys{s.b, s.tk, s.k, s.d};
  const Tensor q = tensor(x.q, queries), k = tensor(x.k, keys), v = tensor(x.v, keys);
  const DType wide = wide_of(dtype), out_dtype = rounded ? dtype : wide;
  const Attended whole{q.make(queries, out_dtype), q.make({s.b, s.h, s.tq + 5}, wide).narrow(2, 3, s.tq)};
  Tensor out = whole.out, lse = whole.lse;
  out.fill(0);
  lse.fill(-INFINITY);  // the lse of no keys
  for (size_t i = 0; i + 1 < cuts.size(); ++i) {
    const int64_t begin = std::min(cuts[i], cuts[i + 1]), count = std::abs(cuts[i + 1] - cuts[i]);
    const Attended part{q.make(queries, out_dtype), q.make({s.b, s.h, s.tq}, wide)};
    attention_into(q, k.narrow(1, begin, count), v.narrow(1, begin, count), {.causal = false}, part);
    merge_attended(whole, part);
  }
  const PlainAttention expected = attend_plainly(s, x);
  EXPECT_LE(row_difference(numbers(out), expected.out, s.d, 0.05), bound_of(dtype));
  EXPECT_LE(row_difference(numbers(lse), expected.lse, 1, 0.01), bound_of(dtype));
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

TEST_F(AttentionExtremes, OfMergedTilesAreThoseOfPlainLoops) { expect_merged(make_arena()); }
TEST_F(AttentionExtremesGpu, OfMergedTilesAreThoseOfPlainLoops) { expect_merged(arena); }

// Each kernel once and no more, for tools that follow every access to memory: tensor cores' and plain ones, with
// dropout and documents and without.
using AttentionGpu = test::OnGpu;
TEST_F(AttentionGpu, SmallShapesForCheckers) {
  expect_plain({.tq = 33, .tk = 33, .h = 2, .d = 64}, Extreme::apart, DType::bfloat16, arena);
  expect_plain({.tq = 20, .tk = 17, .d = 128, .causal = false}, Extreme::apart, DType::bfloat16, arena);
  expect_plain({.tq = 20, .tk = 33, .d = 20}, Extreme::apart, DType::float32, arena);
  expect_merged(DType::bfloat16, true, Extreme::apart, {0, 64, 96}, arena);
  for (const int64_t d : {20, 64}) {
    const AttentionShape s{.tq = 33, .tk = 33, .d = d};
    const AttentionValues x = draw_extreme(s, Extreme::zero, 3);
    AttentionOptions o{.dropout = 0.5, .random = Philox(4)};
    o.starts = Tensor::of<int32_t>(std::vector<int32_t>(33, 0), {1, 33}, make_arena());
    o.starts.narrow(1, 20, 13).fill(18);
    const auto attend = [&](const ArenaPtr& on) {
      const auto tensor = [&](const std::vector<double>& values) {
        return Tensor::of<double>(values, {1, 33, 1, d}, make_arena()).to(DType::bfloat16).to(on);
      };
      AttentionOptions there = o;
      there.starts = o.starts.to(on);
      const Tensor q = tensor(x.q), k = tensor(x.k), v = tensor(x.v);
      const Attended found = attention(q, k, v, there);
      Tensor dq = q.make(q.shape()), dk = q.make(q.shape()), dv = q.make(q.shape());
      attention_backward(tensor(x.dout), q, k, v, found, there, dq, dk, dv);
      return std::vector{numbers(found.out), numbers(dk), numbers(dv)};
    };
    const auto here = attend(make_arena()), there = attend(arena);
    for (size_t i = 0; i < here.size(); ++i) EXPECT_LE(row_difference(there[i], here[i], d, 1.0), 0x1p-6) << d << i;
  }
}

}  // namespace
}  // namespace tessera
