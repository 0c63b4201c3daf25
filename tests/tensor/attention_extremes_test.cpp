// Attention where a softmax goes wrong first: scores that are far apart from one block of keys to the next, all equal,
// blocks of one key, the first and the last query; against plain loops in float64.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "tensor/ops/attention/attention.h"
#include "tests/support/gpu.h"
#include "tests/support/one_thread.h"
#include "tests/support/plain_attention.h"

namespace tessera {
namespace {

using test::AttentionShape;
using test::AttentionValues;
using test::Extreme;
using test::kExtremes;
using test::PlainAttention;
using test::row_difference;

std::vector<double> doubles(const Tensor& t) { return t.to(DType::float64).to_vector<double>(); }

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
  EXPECT_LE(row_difference(doubles(found.out), expected.out, s.d, 0.05), bound) << what;
  EXPECT_LE(row_difference(doubles(found.lse), expected.lse, 1, 0.01), bound) << what;
  EXPECT_LE(row_difference(doubles(dq), expected.dq, s.d, 0.01, expected.dq_terms), 6 * bound) << what;
  EXPECT_LE(row_difference(doubles(dk), expected.dk, s.d, 0.01, expected.dk_terms), 6 * bound) << what;
  EXPECT_LE(row_difference(doubles(dv), expected.dv, s.d, 0.5), bound) << what;
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
  expect_plain_in({DType::float64, DType::float32, DType::bfloat16}, shapes, make_arena());
}

using AttentionExtremesGpu = test::OnGpu;

TEST_F(AttentionExtremesGpu, OfPlainKernelsAreThoseOfPlainLoops) {
  expect_plain_in(test::floating(arena),
                  {{.tq = 1, .tk = 1, .d = 8},
                   {.tq = 65, .tk = 65, .d = 8},
                   {.tq = 17, .tk = 129, .h = 2, .d = 5},
                   {.tq = 64, .tk = 65, .d = 4, .causal = false}},
                  arena);
}

TEST_F(AttentionExtremesGpu, OfTensorCoresAreThoseOfPlainLoops) {
  expect_plain_in({DType::bfloat16},
                  {{.tq = 1, .tk = 1, .d = 64},
                   {.tq = 65, .tk = 65, .d = 64},
                   {.tq = 3, .tk = 130, .h = 2, .d = 64},
                   {.tq = 64, .tk = 129, .d = 64, .causal = false},
                   {.tq = 66, .tk = 66, .d = 128}},
                  arena);
}

// Tiles of keys that are computed apart and merged by their log-sum-exp, in any order.
TEST_F(AttentionExtremes, OfMergedTilesAreThoseOfPlainLoops) {
  for (const DType dtype : {DType::float64, DType::float32})
    for (const Extreme extreme : kExtremes)
      for (const std::vector<int64_t>& cuts :
           {std::vector<int64_t>{0, 1, 96}, {0, 16, 32, 48, 64, 80, 96}, {0, 64, 95, 96}, {0, 1, 2, 3, 96}})
        for (const bool backwards : {false, true}) {
          const int64_t tq = cuts.size() == 7 ? 16 : 1;  // no more than a tile has keys
          const AttentionShape s{.b = 2, .tq = tq, .tk = 96, .h = 2, .k = 2, .d = 8, .causal = false};
          const AttentionValues x = draw_extreme(s, extreme, 7);
          const ArenaPtr arena = make_arena();
          const Shape queries{s.b, s.tq, s.h, s.d}, keys{s.b, s.tk, s.k, s.d};
          const Tensor q = Tensor::of<double>(x.q, queries, arena).to(dtype),
                       k = Tensor::of<double>(x.k, keys, arena).to(dtype),
                       v = Tensor::of<double>(x.v, keys, arena).to(dtype);
          const Attended whole{q.make(queries), q.make({s.b, s.h, s.tq})};
          Tensor out = whole.out, lse = whole.lse;
          out.fill(0);
          lse.fill(-INFINITY);  // of no keys
          for (size_t i = 0; i + 1 < cuts.size(); ++i) {
            const size_t at = backwards ? cuts.size() - 2 - i : i;
            const int64_t begin = cuts[at], count = cuts[at + 1] - begin;
            merge_attended(whole,
                           attention(q, k.narrow(1, begin, count), v.narrow(1, begin, count), {.causal = false}));
          }
          const PlainAttention expected = attend_plainly(s, x);
          EXPECT_LE(row_difference(doubles(out), expected.out, s.d, 0.05), bound_of(dtype));
          EXPECT_LE(row_difference(doubles(lse), expected.lse, 1, 0.01), bound_of(dtype));
        }
}

}  // namespace
}  // namespace tessera
