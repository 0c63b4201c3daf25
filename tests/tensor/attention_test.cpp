// Tiles of the attention matrix: computed apart and put together they are the whole, in their dropout too.
#include "tensor/ops/attention/attention.h"

#include "tensor/ops/elementwise.h"
#include "tests/support/errors.h"
#include "tests/support/tensors.h"

namespace tessera {
namespace {

using test::apart;

Tensor normal(const Shape& shape, DType dtype, const ArenaPtr& arena, uint64_t name) {
  return test::normal(shape, dtype, name, "tiles", arena);
}

// Documents of random lengths in each sequence: where that of each token begins.
Tensor draw_starts(int64_t sequences, int64_t tokens, const Philox& random, const ArenaPtr& arena) {
  const Tensor starts = Tensor::empty({sequences, tokens}, DType::int32, arena);
  for (int64_t i = 0; i < starts.numel(); ++i) {
    const bool begins = i % tokens == 0 || random.below(20, static_cast<uint64_t>(i), 99) == 0;
    starts.data<int32_t>()[i] = begins ? static_cast<int32_t>(i % tokens) : starts.data<int32_t>()[i - 1];
  }
  return starts;
}

Tensor all_at(const Shape& shape, int64_t start, const ArenaPtr& arena) {
  Tensor starts = Tensor::empty(shape, DType::int32, arena);
  starts.fill(static_cast<double>(start));
  return starts;
}

double bound_of(DType dtype) { return dtype == DType::float64 ? 1e-13 : dtype == DType::float32 ? 1e-5 : 0x1p-7; }

struct Operands {
  Tensor q, k, v, dout;
};
struct Gradients {
  Tensor dq, dk, dv;
};

Gradients zeros(const Operands& x, DType dtype) {
  Gradients g{x.q.make(x.q.shape(), dtype), x.q.make(x.k.shape(), dtype), x.q.make(x.v.shape(), dtype)};
  for (Tensor* t : {&g.dq, &g.dk, &g.dv}) t->fill(0);
  return g;
}

struct Span {
  int64_t begin, size;
  Tensor of(const Tensor& t) const { return t.narrow(1, begin, size); }
};

// Attention of the queries of one chunk to some keys. Causal: the last key is that of the last query.
struct Tile {
  Span queries, keys;
  AttentionOptions options;

  Tile(const AttentionOptions& whole, const Span& q, const Span& k) : queries(q), keys(k), options(whole) {
    options.causal = whole.causal && k.begin + k.size > q.begin;
    options.first_query = q.begin;
    options.first_key = k.begin;
    if (whole.starts.defined()) options.starts = q.of(whole.starts);
  }
  Attended attend(const Operands& x) const {
    const DType wide = wide_of(x.q.dtype());
    const int64_t b = x.q.dim(0), heads = x.q.dim(2);
    Attended a{x.q.make({b, queries.size, heads, x.q.dim(3)}, wide), x.q.make({b, heads, queries.size}, wide)};
    attention_into(queries.of(x.q), keys.of(x.k), keys.of(x.v), options, a);
    return a;
  }
  void add_gradients(const Operands& x, const Attended& all_keys, const Gradients& to) const {
    const Operands own{queries.of(x.q), keys.of(x.k), keys.of(x.v), queries.of(x.dout)};
    Gradients g = zeros(own, wide_of(x.q.dtype()));
    attention_backward(own.dout, own.q, own.k, own.v, all_keys, options, g.dq, g.dk, g.dv);
    const std::array<Tensor, 3> sums{queries.of(to.dq), keys.of(to.dk), keys.of(to.dv)}, parts{g.dq, g.dk, g.dv};
    for (size_t i = 0; i < 3; ++i) {
      Tensor sum = sums[i];
      add_(sum, parts[i]);
    }
  }
};

struct Drawn {
  Operands x;
  AttentionOptions options;
  int64_t chunks, size;
};

Drawn draw(DType dtype, uint64_t trial, const ArenaPtr& arena) {
  const Philox random = Philox::named(trial, "shapes");
  const auto below = [&](uint64_t n, uint64_t i) { return static_cast<int64_t>(random.below(n, i)); };
  const int64_t b = 1 + below(2, 0), chunks = 2 + below(3, 1), heads = 1 + below(3, 2);
  const int64_t size = std::array<int64_t, 6>{1, 5, 33, 48, 64, 70}[static_cast<size_t>(below(6, 3))];
  const int64_t d = std::array<int64_t, 4>{3, 16, 20, 33}[static_cast<size_t>(below(4, 4))];
  AttentionOptions o;
  o.causal = below(3, 5) != 0;
  o.dropout = below(3, 6) == 0 ? 0 : 0.3;
  o.random = Philox(trial);
  o.step = trial;
  o.first_sequence = below(4, 7);
  o.first_head = below(3, 8);
  o.heads_total = o.first_head + 3 * heads + below(2, 9);
  o.tokens_total = chunks * size + below(2, 10) * 7;
  o.window = std::array<int64_t, 5>{0, 0, 1, 40, 100}[static_cast<size_t>(below(5, 13))];
  if (below(2, 12) == 0) o.starts = draw_starts(b, chunks * size, random, arena);
  const int64_t group = 1 + below(3, 11);
  const auto make = [&](uint64_t name) {
    const bool shared = name == 1 || name == 2;  // k and v
    return normal({b, chunks * size, shared ? heads : heads * group, d}, dtype, arena, 4 * trial + name);
  };
  return {{make(0), make(1), make(2), make(3)}, o, chunks, size};
}

// Two tiles for each chunk of queries, or one: keys before a random chunk, and those from there on.
void check_tiles(DType dtype, uint64_t trial) {
  const ArenaPtr arena = make_arena();
  const Drawn drawn = draw(dtype, trial, arena);
  const Operands& x = drawn.x;
  const Attended whole = attention(x.q, x.k, x.v, drawn.options);
  Gradients expected = zeros(x, dtype);
  attention_backward(x.dout, x.q, x.k, x.v, whole, drawn.options, expected.dq, expected.dk, expected.dv);
  const Gradients sums = zeros(x, wide_of(dtype));
  const std::string what = std::string(name_of(dtype)) + " trial " + std::to_string(trial);
  for (int64_t i = 0; i < drawn.chunks; ++i) {
    const int64_t last = drawn.options.causal ? i + 1 : drawn.chunks, n = drawn.size;
    const auto cut = static_cast<int64_t>(Philox(trial).below(static_cast<uint64_t>(last), static_cast<uint64_t>(i)));
    const Span queries{i * n, n};
    std::vector<Tile> tiles;
    if (cut > 0) tiles.emplace_back(drawn.options, queries, Span{0, cut * n});
    tiles.emplace_back(drawn.options, queries, Span{cut * n, (last - cut) * n});
    const Attended merged = tiles[0].attend(x);
    if (tiles.size() > 1) merge_attended(merged, tiles[1].attend(x));
    EXPECT_LE(apart(merged.out, queries.of(whole.out)), bound_of(dtype)) << what;
    EXPECT_LE(apart(merged.lse, whole.lse.narrow(2, i * n, n)), bound_of(wide_of(dtype))) << what;
    const Attended rounded{merged.out.to(dtype), merged.lse};
    for (const Tile& tile : tiles) tile.add_gradients(x, rounded, sums);
  }
  EXPECT_LE(apart(sums.dq, expected.dq), bound_of(dtype)) << what << " dq";
  EXPECT_LE(apart(sums.dk, expected.dk), bound_of(dtype)) << what << " dk";
  EXPECT_LE(apart(sums.dv, expected.dv), bound_of(dtype)) << what << " dv";
}

TEST(Attention, TilesMakeTheWhole) {
  for (const DType dtype : {DType::float64, DType::float32, DType::bfloat16})
    for (uint64_t trial = 0; trial < 30; ++trial) check_tiles(dtype, trial);
}

// A window is what starts one later for each query are.
TEST(Attention, AWindowIsStartsThatMoveOn) {
  const ArenaPtr arena = make_arena();
  constexpr int64_t kTokens = 150;
  for (const DType dtype : {DType::float64, DType::float32, DType::bfloat16})
    for (const int64_t window : {1, 5, 64, 100, 150, 1000}) {
      std::vector<int32_t> first;
      for (int64_t i = 0; i < kTokens; ++i) first.push_back(static_cast<int32_t>(std::max<int64_t>(0, i - window + 1)));
      const AttentionOptions slides{.window = window},
          starts{.starts = Tensor::of<int32_t>(first, {1, kTokens}, arena)};
      const auto make = [&](uint64_t name) { return normal({1, kTokens, 2, 16}, dtype, arena, name); };
      const Tensor q = make(0), k = make(1), v = make(2), dout = make(3);
      const Attended a = attention(q, k, v, slides), b = attention(q, k, v, starts);
      EXPECT_EQ(apart(a.out, b.out) + apart(a.lse, b.lse), 0) << window;
      const Operands x{q, k, v, dout};
      Gradients of_a = zeros(x, dtype), of_b = zeros(x, dtype);
      attention_backward(dout, q, k, v, a, slides, of_a.dq, of_a.dk, of_a.dv);
      attention_backward(dout, q, k, v, b, starts, of_b.dq, of_b.dk, of_b.dv);
      EXPECT_EQ(apart(of_a.dq, of_b.dq) + apart(of_a.dk, of_b.dk) + apart(of_a.dv, of_b.dv), 0) << window;
      EXPECT_EQ(apart(a.out, attention(q, k, v).out) == 0, window >= kTokens) << window;
    }
}

// Queries that begin to see at a key have what they would have if the keys before it were not there.
TEST(Attention, KeysBeforeAStartAreNotSeen) {
  const ArenaPtr arena = make_arena();
  constexpr int64_t kTokens = 200, kStart = 130;
  for (const DType dtype : {DType::float64, DType::float32, DType::bfloat16}) {
    const auto make = [&](uint64_t name) { return normal({1, kTokens, 2, 16}, dtype, arena, name); };
    const Operands x{make(1), make(2), make(3), make(4)};
    const auto last = [](const Tensor& t) { return t.narrow(1, kStart, kTokens - kStart); };
    const AttentionOptions o{.starts = all_at({1, kTokens - kStart}, kStart, arena)};
    const Attended found = attention(last(x.q), x.k, x.v, o), alone = attention(last(x.q), last(x.k), last(x.v));
    EXPECT_LE(apart(found.out, alone.out), bound_of(dtype));
    EXPECT_LE(apart(found.lse, alone.lse), bound_of(wide_of(dtype)));
    Gradients g = zeros({last(x.q), x.k, x.v, {}}, dtype),
              expected = zeros({last(x.q), last(x.k), last(x.v), {}}, dtype);
    attention_backward(last(x.dout), last(x.q), x.k, x.v, found, o, g.dq, g.dk, g.dv);
    attention_backward(last(x.dout), last(x.q), last(x.k), last(x.v), alone, {}, expected.dq, expected.dk, expected.dv);
    EXPECT_LE(apart(g.dq, expected.dq), bound_of(dtype));
    EXPECT_LE(apart(last(g.dk), expected.dk), bound_of(dtype));
    for (const double before : g.dv.narrow(1, 0, kStart).to(DType::float64).to_vector<double>()) EXPECT_EQ(before, 0);
  }
}

TEST(Attention, AQueryThatSeesNoKeyGivesZeros) {
  const ArenaPtr arena = make_arena();
  for (const DType dtype : {DType::float64, DType::float32, DType::bfloat16})
    for (const int64_t tokens : {3, 70}) {
      const Tensor x = normal({1, tokens, 1, 16}, dtype, arena, 1);
      const AttentionOptions none{.causal = false, .starts = all_at({1, tokens}, tokens, arena)};
      const DType wide = wide_of(dtype);
      const Attended part{x.make(x.shape(), wide), x.make({1, 1, tokens}, wide)};
      attention_into(x, x, x, none, part);
      for (const double y : part.out.to(DType::float64).to_vector<double>()) EXPECT_EQ(y, 0);
      for (const double y : part.lse.to(DType::float64).to_vector<double>()) EXPECT_EQ(y, -INFINITY);
      Gradients g = zeros({x, x, x, x}, dtype);
      attention_backward(x, x, x, x, {part.out.to(dtype), part.lse}, none, g.dq, g.dk, g.dv);
      for (const Tensor& t : {g.dq, g.dk, g.dv})
        for (const double y : t.to(DType::float64).to_vector<double>()) EXPECT_EQ(y, 0);
      merge_attended(part, {part.out.clone(), part.lse.clone()});
      EXPECT_EQ(part.lse.to(DType::float64).to_vector<double>().back(), -INFINITY);
      EXPECT_EQ(part.out.to(DType::float64).to_vector<double>().back(), 0);
      const Attended all{x.make(x.shape(), wide), x.make({1, 1, tokens}, wide)};
      attention_into(x, x, x, {.causal = false}, all);
      const Attended merged{all.out.clone(), all.lse.clone()};
      merge_attended(merged, part);
      EXPECT_EQ(merged.out.to(DType::float64).to_vector<double>(), all.out.to(DType::float64).to_vector<double>());
      EXPECT_EQ(merged.lse.to(DType::float64).to_vector<double>(), all.lse.to(DType::float64).to_vector<double>());
    }
}

// Equal scores and the identity for values: the output shows which elements the dropout kept.
std::vector<bool> kept(const AttentionOptions& options, int64_t queries, int64_t keys, DType dtype) {
  const ArenaPtr arena = make_arena();
  const Tensor q = Tensor::zeros({1, queries, 1, keys}, dtype, arena);
  const Tensor k = Tensor::zeros({1, keys, 1, keys}, dtype, arena), v = Tensor::zeros({1, keys, 1, keys}, dtype, arena);
  for (int64_t i = 0; i < keys; ++i) v.select(1, i).narrow(2, i, 1).fill(1);
  std::vector<bool> elements;
  for (const double y : attention(q, k, v, options).out.to(DType::float64).to_vector<double>())
    elements.push_back(y != 0);
  return elements;
}

TEST(Attention, ATileDropsWhatTheWholeDrops) {
  constexpr int64_t kTokens = 90;
  for (const DType dtype : {DType::float64, DType::bfloat16})
    for (uint64_t trial = 0; trial < 20; ++trial) {
      AttentionOptions o{.causal = false, .dropout = 0.5, .random = Philox(trial)};
      const std::vector<bool> whole = kept(o, kTokens, kTokens, dtype);
      const auto keys = static_cast<int64_t>(1 + Philox(9).below(kTokens, trial));
      const auto queries = static_cast<int64_t>(1 + Philox(10).below(static_cast<uint64_t>(keys), trial));
      o.first_key = static_cast<int64_t>(Philox(11).below(static_cast<uint64_t>(kTokens - keys + 1), trial));
      o.first_query = static_cast<int64_t>(Philox(12).below(static_cast<uint64_t>(kTokens - queries + 1), trial));
      o.tokens_total = kTokens;
      std::vector<bool> expected;
      for (int64_t i = 0; i < queries; ++i)
        for (int64_t j = 0; j < keys; ++j)
          expected.push_back(whole[static_cast<size_t>((o.first_query + i) * kTokens + o.first_key + j)]);
      EXPECT_EQ(kept(o, queries, keys, dtype), expected) << name_of(dtype) << " trial " << trial;
    }
}

TEST(Attention, QueriesAreTheLastTokensUnlessTheySayOtherwise) {
  AttentionOptions o{.causal = false, .dropout = 0.5, .random = Philox(3)};
  o.tokens_total = 40;
  const std::vector<bool> last = kept(o, 20, 30, DType::float32);
  o.first_query = 10;
  EXPECT_EQ(kept(o, 20, 30, DType::float32), last);
  o.first_query = 11;
  EXPECT_NE(kept(o, 20, 30, DType::float32), last);
}

TEST(Attention, WhatCannotBeIsRefused) {
  const ArenaPtr arena = make_arena();
  const auto make = [&](const Shape& shape, DType dtype) { return Tensor::zeros(shape, dtype, arena); };
  const Tensor x = make({1, 4, 2, 3}, DType::bfloat16), lse = make({1, 2, 4}, DType::float32);
  AttentionOptions o{.dropout = 0.5};
  o.first_query = o.first_key = 5;
  EXPECT_EQ(error_of([&] { attention(x, x, x, o); }),
            "[attention] the tile reaches token 8 of 4; say how many there are in tokens_total");
  EXPECT_EQ(error_of([&] {
              attention_into(x, x, x, {}, {make(x.shape(), DType::float64), lse});
            }),
            "[attention] out is float64 (1, 4, 2, 3); expected bfloat16 (1, 4, 2, 3), or that in the type of its sums, "
            "the last dim running on");
  EXPECT_EQ(error_of([&] {
              attention_into(x, x, x, {}, {x.clone(), lse.narrow(2, 0, 3)});
            }),
            "[attention] lse is float32 (1, 2, 3); expected contiguous (B, H, Tq) for q bfloat16 (1, 4, 2, 3)");
  EXPECT_EQ(
      error_of([&] {
        attention(x, x, x, {.starts = make({1, 3}, DType::int32)});
      }),
      "[attention] starts is int32 (1, 3); expected int32 (B, Tq) beside q bfloat16 (1, 4, 2, 3), rows running on");
  EXPECT_EQ(error_of([&] {
              merge_attended({x, lse}, {make(x.shape(), DType::float64), lse});
            }),
            "[merge_attended] into is bfloat16 (1, 4, 2, 3) with lse float32 (1, 2, 4), part float64 (1, 4, 2, 3) with "
            "lse float32 (1, 2, 4); expected the same shapes, rows that run on, sums of one dtype and a contiguous lse "
            "of the part");
}

}  // namespace
}  // namespace tessera
