// Tiles of the attention matrix: computed separately and merged they equal full attention, including dropout, on the
// CPU and on a GPU.
#include "tensor/ops/attention/attention.h"

#include <algorithm>
#include <array>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "tensor/ops/elementwise.h"
#include "tests/support/errors.h"
#include "tests/support/gpu.h"
#include "tests/support/tensors.h"

namespace tessera {
namespace {

using test::apart, test::host_values;

Tensor normal(const Shape& shape, DType dtype, const ArenaPtr& arena, uint64_t name) {
  return test::normal(shape, dtype, name, "tiles", arena);
}

// Random document starts per token and sequence.
Tensor random_starts(int64_t sequences, int64_t tokens, const Philox& random, const ArenaPtr& arena) {
  int64_t start = 0;
  return test::made({sequences, tokens}, DType::int32, arena, [&](size_t i) {
    const int64_t token = static_cast<int64_t>(i) % tokens;
    return start = token == 0 || random.below(20, i, 99) == 0 ? token : start;
  });
}

Tensor all_at(const Shape& shape, int64_t start, const ArenaPtr& arena) {
  return test::made(shape, DType::int32, arena, [&](size_t) { return start; });
}

double error_bound(DType dtype) { return dtype == DType::float64 ? 1e-13 : dtype == DType::float32 ? 1e-5 : 0x1p-7; }

struct Gradients {
  Tensor dq, dk, dv;
};
struct Operands {
  Tensor q, k, v, dout;
  Gradients zeros(DType dtype) const {
    Gradients g{q.make(q.shape(), dtype), q.make(k.shape(), dtype), q.make(v.shape(), dtype)};
    for (Tensor* t : {&g.dq, &g.dk, &g.dv}) t->fill(0);
    return g;
  }
  Gradients gradients(const AttentionResult& forward, const AttentionOptions& o, DType dtype) const {
    Gradients g = zeros(dtype);
    attention_backward(dout, q, k, v, forward, o, g.dq, g.dk, g.dv);
    return g;
  }
  Gradients gradients(const AttentionResult& forward, const AttentionOptions& o) const {
    return gradients(forward, o, q.dtype());
  }
};

struct Span {
  int64_t begin, size;
  Tensor of(const Tensor& t) const { return t.narrow(1, begin, size); }
};

// Attention of one chunk of queries to a range of keys. If causal, the last key belongs to the last query.
struct Tile {
  Span queries, keys;
  AttentionOptions options;

  Tile(const AttentionOptions& full, const Span& q, const Span& k) : queries(q), keys(k), options(full) {
    options.causal = full.causal && k.begin + k.size > q.begin;
    options.first_query = q.begin;
    options.first_key = k.begin;
    if (full.starts.defined()) options.starts = q.of(full.starts);
  }
  AttentionResult attend(const Operands& x) const {
    const DType wide = accum_dtype(x.q.dtype());
    const int64_t b = x.q.dim(0), heads = x.q.dim(2);
    AttentionResult a{x.q.make({b, queries.size, heads, x.q.dim(3)}, wide), x.q.make({b, heads, queries.size}, wide)};
    attention_into(queries.of(x.q), keys.of(x.k), keys.of(x.v), options, a);
    return a;
  }
  void add_gradients(const Operands& x, const AttentionResult& all_keys, const Gradients& to) const {
    const Operands own{queries.of(x.q), keys.of(x.k), keys.of(x.v), queries.of(x.dout)};
    const Gradients g = own.gradients(all_keys, options, accum_dtype(x.q.dtype()));
    Tensor dq = queries.of(to.dq), dk = keys.of(to.dk), dv = keys.of(to.dv);
    add_(dq, g.dq), add_(dk, g.dk), add_(dv, g.dv);
  }
};

// Each chunk of queries has one or two tiles: the keys before a random chunk, and those from that chunk on.
void check_tiles(DType dtype, uint64_t trial) {
  const ArenaPtr arena = make_arena();
  const Philox random = Philox::named(trial, "shapes");
  const auto below = [&](uint64_t n, uint64_t i) { return static_cast<int64_t>(random.below(n, i)); };
  const int64_t b = 1 + below(2, 0), chunks = 2 + below(3, 1), heads = 1 + below(3, 2);
  const int64_t n = std::array<int64_t, 6>{1, 5, 33, 48, 64, 70}[static_cast<size_t>(below(6, 3))];
  const int64_t d = std::array<int64_t, 4>{3, 16, 20, 33}[static_cast<size_t>(below(4, 4))];
  AttentionOptions o;
  o.causal = below(3, 5) != 0;
  o.dropout = below(3, 6) == 0 ? 0 : 0.3;
  o.random = Philox(trial);
  o.step = trial;
  o.first_sequence = below(4, 7);
  o.first_head = below(3, 8);
  o.heads_total = o.first_head + 3 * heads + below(2, 9);
  o.tokens_total = chunks * n + below(2, 10) * 7;
  o.window = std::array<int64_t, 5>{0, 0, 1, 40, 100}[static_cast<size_t>(below(5, 13))];
  if (below(2, 12) == 0) o.starts = random_starts(b, chunks * n, random, arena);
  const int64_t group = 1 + below(3, 11);
  const auto make = [&](uint64_t name) {
    const bool shared = name == 1 || name == 2;  // k and v
    return normal({b, chunks * n, shared ? heads : heads * group, d}, dtype, arena, 4 * trial + name);
  };
  const Operands x{make(0), make(1), make(2), make(3)};
  const AttentionResult full = attention(x.q, x.k, x.v, o);
  const Gradients expected = x.gradients(full, o), sums = x.zeros(accum_dtype(dtype));
  const std::string what = std::string(to_string(dtype)) + " trial " + std::to_string(trial);
  for (int64_t i = 0; i < chunks; ++i) {
    const int64_t last = o.causal ? i + 1 : chunks;
    const auto cut = static_cast<int64_t>(Philox(trial).below(static_cast<uint64_t>(last), static_cast<uint64_t>(i)));
    const Span queries{i * n, n};
    std::vector<Tile> tiles;
    if (cut > 0) tiles.emplace_back(o, queries, Span{0, cut * n});
    tiles.emplace_back(o, queries, Span{cut * n, (last - cut) * n});
    const AttentionResult merged = tiles[0].attend(x);
    if (tiles.size() > 1) merge_attention(merged, tiles[1].attend(x));
    EXPECT_LE(apart(merged.out, queries.of(full.out)), error_bound(dtype)) << what;
    EXPECT_LE(apart(merged.lse, full.lse.narrow(2, i * n, n)), error_bound(accum_dtype(dtype))) << what;
    const AttentionResult rounded{merged.out.to(dtype), merged.lse};
    for (const Tile& tile : tiles) tile.add_gradients(x, rounded, sums);
  }
  EXPECT_LE(apart(sums.dq, expected.dq), error_bound(dtype)) << what << " dq";
  EXPECT_LE(apart(sums.dk, expected.dk), error_bound(dtype)) << what << " dk";
  EXPECT_LE(apart(sums.dv, expected.dv), error_bound(dtype)) << what << " dv";
}

TEST(Attention, MergedTilesMatchFullAttention) {
  for (const DType dtype : {DType::float64, DType::float32, DType::bfloat16})
    for (uint64_t trial = 0; trial < 30; ++trial) check_tiles(dtype, trial);
}

using AttentionGpu = test::OnGpu;

// Attention of the last queries, computed in two tiles of keys, with slices of one packed tensor and both plain and
// tensor-core kernels.
TEST_F(AttentionGpu, MergedTilesMatchFullAttention) {
  constexpr int64_t kKeys = 150;
  constexpr Span kQueries{90, 60};
  for (const auto& [dtype, d] : {std::pair{DType::float64, 16}, {DType::float32, 33}, {DType::bfloat16, 64}})
    for (const int64_t cut : {60, 64, 90}) {
      if (!test::has_kernels(dtype, Device::cuda)) continue;
      SCOPED_TRACE(std::to_string(d) + " cut " + std::to_string(cut));
      const auto sample = [&, dtype = dtype, d = d](int64_t heads, uint64_t name) {
        return test::normal({1, kKeys, heads, d}, dtype, name, "attention on a GPU", arena);
      };
      const Tensor packed = sample(4, 3);
      const Operands x{packed.narrow(2, 0, 2), packed.narrow(2, 2, 1), packed.narrow(2, 3, 1), sample(2, 4)};
      const AttentionOptions o{.dropout = 0.25, .random = Philox(6), .tokens_total = kKeys};
      const Tile all(o, kQueries, {0, kKeys}), tiles[] = {{o, kQueries, {0, cut}}, {o, kQueries, {cut, kKeys - cut}}};
      const AttentionResult full = all.attend(x), merged = tiles[0].attend(x);
      merge_attention(merged, tiles[1].attend(x));
      EXPECT_LE(apart(merged.out, full.out), error_bound(dtype));
      EXPECT_LE(apart(merged.lse, full.lse), error_bound(accum_dtype(dtype)));
      const Gradients expected = x.zeros(accum_dtype(dtype)), sums = x.zeros(accum_dtype(dtype));
      all.add_gradients(x, {full.out.to(dtype), full.lse}, expected);
      for (const Tile& tile : tiles) {
        tile.add_gradients(x, {merged.out.to(dtype), merged.lse}, sums);
        EXPECT_LE(apart(tile.keys.of(sums.dk), tile.keys.of(expected.dk)), error_bound(dtype));
        EXPECT_LE(apart(tile.keys.of(sums.dv), tile.keys.of(expected.dv)), error_bound(dtype));
      }
      EXPECT_LE(apart(sums.dq, expected.dq), error_bound(dtype));
    }
}

// A window is equivalent to document starts that increase by one per query.
TEST(Attention, WindowMatchesSlidingStarts) {
  const ArenaPtr arena = make_arena();
  constexpr int64_t kTokens = 150;
  for (const DType dtype : {DType::float64, DType::float32, DType::bfloat16})
    for (const int64_t window : {1, 5, 64, 100, 150, 1000}) {
      const auto first = [&](size_t i) { return std::max<int64_t>(0, static_cast<int64_t>(i) - window + 1); };
      const AttentionOptions slides{.window = window},
          starts{.starts = test::made({1, kTokens}, DType::int32, arena, first)};
      const auto make = [&](uint64_t name) { return normal({1, kTokens, 2, 16}, dtype, arena, name); };
      const Operands x{make(0), make(1), make(2), make(3)};
      const AttentionResult a = attention(x.q, x.k, x.v, slides), b = attention(x.q, x.k, x.v, starts);
      EXPECT_EQ(apart(a.out, b.out) + apart(a.lse, b.lse), 0) << window;
      const Gradients of_a = x.gradients(a, slides), of_b = x.gradients(b, starts);
      EXPECT_EQ(apart(of_a.dq, of_b.dq) + apart(of_a.dk, of_b.dk) + apart(of_a.dv, of_b.dv), 0) << window;
      EXPECT_EQ(apart(a.out, attention(x.q, x.k, x.v).out) == 0, window >= kTokens) << window;
    }
}

// Results equal those without the keys before the start.
TEST(Attention, KeysBeforeStartAreIgnored) {
  const ArenaPtr arena = make_arena();
  constexpr int64_t kTokens = 200, kStart = 130;
  for (const DType dtype : {DType::float64, DType::float32, DType::bfloat16}) {
    const auto make = [&](uint64_t name) { return normal({1, kTokens, 2, 16}, dtype, arena, name); };
    const Operands x{make(1), make(2), make(3), make(4)};
    const auto last = [](const Tensor& t) { return t.narrow(1, kStart, kTokens - kStart); };
    const AttentionOptions o{.starts = all_at({1, kTokens - kStart}, kStart, arena)};
    const Operands late{last(x.q), x.k, x.v, last(x.dout)}, own{late.q, last(x.k), last(x.v), late.dout};
    const AttentionResult found = attention(late.q, x.k, x.v, o), alone = attention(own.q, own.k, own.v);
    EXPECT_LE(apart(found.out, alone.out), error_bound(dtype));
    EXPECT_LE(apart(found.lse, alone.lse), error_bound(accum_dtype(dtype)));
    const Gradients g = late.gradients(found, o), expected = own.gradients(alone, {});
    EXPECT_LE(apart(g.dq, expected.dq), error_bound(dtype));
    EXPECT_LE(apart(last(g.dk), expected.dk), error_bound(dtype));
    for (const double before : g.dv.narrow(1, 0, kStart).to(DType::float64).to_vector<double>()) EXPECT_EQ(before, 0);
  }
}

TEST(Attention, QueryWithoutKeysReturnsZeros) {
  const ArenaPtr arena = make_arena();
  for (const DType dtype : {DType::float64, DType::float32, DType::bfloat16})
    for (const int64_t tokens : {3, 70}) {
      const Tensor x = normal({1, tokens, 1, 16}, dtype, arena, 1);
      const AttentionOptions none{.causal = false, .starts = all_at({1, tokens}, tokens, arena)};
      const DType wide = accum_dtype(dtype);
      const AttentionResult part{x.make(x.shape(), wide), x.make({1, 1, tokens}, wide)};
      attention_into(x, x, x, none, part);
      for (const double y : host_values(part.out)) EXPECT_EQ(y, 0);
      for (const double y : host_values(part.lse)) EXPECT_EQ(y, -INFINITY);
      const Gradients g = Operands{x, x, x, x}.gradients({part.out.to(dtype), part.lse}, none);
      for (const Tensor& t : {g.dq, g.dk, g.dv})
        for (const double y : host_values(t)) EXPECT_EQ(y, 0);
      merge_attention(part, {part.out.clone(), part.lse.clone()});
      EXPECT_EQ(host_values(part.lse).back(), -INFINITY);
      EXPECT_EQ(host_values(part.out).back(), 0);
      const AttentionResult all{x.make(x.shape(), wide), x.make({1, 1, tokens}, wide)};
      attention_into(x, x, x, {.causal = false}, all);
      const AttentionResult merged{all.out.clone(), all.lse.clone()};
      merge_attention(merged, part);
      EXPECT_TRUE(test::bitwise_equal({merged.out, merged.lse}, {all.out, all.lse}));
    }
}

// Equal scores and identity values: the output is the dropout mask.
std::vector<bool> keep_mask(const AttentionOptions& options, int64_t queries, int64_t keys, DType dtype) {
  const ArenaPtr arena = make_arena();
  const Tensor q = Tensor::zeros({1, queries, 1, keys}, dtype, arena),
               k = Tensor::zeros({1, keys, 1, keys}, dtype, arena), v = k.clone();
  for (int64_t i = 0; i < keys; ++i) v.select(1, i).narrow(2, i, 1).fill(1);
  std::vector<bool> elements;
  for (const double y : host_values(attention(q, k, v, options).out)) elements.push_back(y != 0);
  return elements;
}

TEST(Attention, TileDropoutMatchesFullDropout) {
  constexpr int64_t kTokens = 90;
  for (const DType dtype : {DType::float64, DType::bfloat16})
    for (uint64_t trial = 0; trial < 20; ++trial) {
      AttentionOptions o{.causal = false, .dropout = 0.5, .random = Philox(trial)};
      const std::vector<bool> full = keep_mask(o, kTokens, kTokens, dtype);
      const auto keys = static_cast<int64_t>(1 + Philox(9).below(kTokens, trial));
      const auto queries = static_cast<int64_t>(1 + Philox(10).below(static_cast<uint64_t>(keys), trial));
      o.first_key = static_cast<int64_t>(Philox(11).below(static_cast<uint64_t>(kTokens - keys + 1), trial));
      o.first_query = static_cast<int64_t>(Philox(12).below(static_cast<uint64_t>(kTokens - queries + 1), trial));
      o.tokens_total = kTokens;
      std::vector<bool> expected;
      for (int64_t i = 0; i < queries; ++i)
        for (int64_t j = 0; j < keys; ++j)
          expected.push_back(full[static_cast<size_t>((o.first_query + i) * kTokens + o.first_key + j)]);
      EXPECT_EQ(keep_mask(o, queries, keys, dtype), expected) << to_string(dtype) << " trial " << trial;
    }
}

TEST(Attention, QueriesDefaultToTheLastTokens) {
  AttentionOptions o{.causal = false, .dropout = 0.5, .random = Philox(3)};
  o.tokens_total = 40;
  const std::vector<bool> last = keep_mask(o, 20, 30, DType::float32);
  o.first_query = 10;
  EXPECT_EQ(keep_mask(o, 20, 30, DType::float32), last);
  o.first_query = 11;
  EXPECT_NE(keep_mask(o, 20, 30, DType::float32), last);
}

TEST(Attention, RejectsInvalidArguments) {
  const ArenaPtr arena = make_arena();
  const auto make = [&](const Shape& shape, DType dtype) { return Tensor::zeros(shape, dtype, arena); };
  const Tensor x = make({1, 4, 2, 3}, DType::bfloat16), lse = make({1, 2, 4}, DType::float32),
               wide = make(x.shape(), DType::float64);
  const auto into = [&](const AttentionResult& out) {
    return error_message([&] { attention_into(x, x, x, {}, out); });
  };
  AttentionOptions o{.dropout = 0.5};
  o.first_query = o.first_key = 5;
  EXPECT_EQ(error_message([&] { attention(x, x, x, o); }),
            "[attention] the tile extends to token 8 of 4; set tokens_total to the number of tokens");
  EXPECT_EQ(into({wide, lse}),
            "[attention] out is float64 (1, 4, 2, 3); expected bfloat16 (1, 4, 2, 3), or its accumulation dtype, "
            "with a contiguous last dim");
  EXPECT_EQ(into({x.clone(), lse.narrow(2, 0, 3)}),
            "[attention] lse is float32 (1, 2, 3); expected contiguous (B, H, Tq) for q bfloat16 (1, 4, 2, 3)");
  const AttentionOptions three{.starts = make({1, 3}, DType::int32)};
  EXPECT_EQ(
      error_message([&] { attention(x, x, x, three); }),
      "[attention] starts is int32 (1, 3); expected int32 (B, Tq) with contiguous rows, for q bfloat16 (1, 4, 2, 3)");
  const AttentionResult here{x, lse}, there{wide, lse};
  EXPECT_EQ(error_message([&] { merge_attention(here, there); }),
            "[merge_attention] into is bfloat16 (1, 4, 2, 3) with lse float32 (1, 2, 4), tile float64 (1, 4, 2, 3) "
            "with lse float32 (1, 2, 4); expected equal shapes, contiguous rows, one accumulation dtype, and a "
            "contiguous lse in the tile");
}

}  // namespace
}  // namespace tessera
