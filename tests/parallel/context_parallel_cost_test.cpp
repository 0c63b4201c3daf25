// Context parallelism: who has what and computes what, what is moved and held, and when it is sent.

#include "autograd/ops.h"
#include "parallel/comm/launch.h"
#include "parallel/comm/trace.h"
#include "parallel/context_parallel.h"
#include "tests/support/errors.h"

namespace tessera {
namespace {

constexpr std::array<Balance, 2> kBalances{Balance::zigzag, Balance::contiguous};

LaunchOptions ranks(int n) { return {.ranks = n, .threads_per_rank = 1, .timeout_s = 120}; }

// --- tokens and chunks ---
TEST(ContextPositions, CutTheSequence) {
  using List = std::vector<int64_t>;
  EXPECT_EQ(context_positions(12, 3, 0, Balance::zigzag), (List{0, 1, 10, 11}));
  EXPECT_EQ(context_positions(12, 3, 1, Balance::zigzag), (List{2, 3, 8, 9}));
  EXPECT_EQ(context_positions(12, 3, 2, Balance::zigzag), (List{4, 5, 6, 7}));
  EXPECT_EQ(context_positions(12, 3, 1, Balance::contiguous), (List{4, 5, 6, 7}));
  EXPECT_EQ(context_positions(5, 1, 0, Balance::zigzag), (List{0, 1, 2, 3, 4}));
  for (const Balance balance : kBalances)
    for (const int n : {1, 2, 3, 4, 7}) {
      std::set<int64_t> all;
      for (int r = 0; r < n; ++r) {
        const List mine = context_positions(6L * n, n, r, balance);
        EXPECT_EQ(mine.size(), 6u);
        EXPECT_TRUE(std::is_sorted(mine.begin(), mine.end()));
        all.insert(mine.begin(), mine.end());
      }
      EXPECT_EQ(all.size(), 6u * static_cast<size_t>(n));
      EXPECT_EQ(*all.rbegin(), 6L * n - 1);
    }
}

TEST(ContextPositions, WhatCannotBeCutIsRefused) {
  EXPECT_EQ(error_of([] { context_positions(20, 4, 0, Balance::zigzag); }),
            "[context_parallel] 20 tokens do not make 8 equal chunks for 4 ranks; expected 16 or 24");
  EXPECT_EQ(error_of([] { context_positions(3, 4, 0, Balance::contiguous); }),
            "[context_parallel] 3 tokens do not make 4 equal chunks for 4 ranks; expected 4");
  EXPECT_EQ(error_of([] { context_positions(0, 1, 0, Balance::zigzag); }),
            "[context_parallel] 0 tokens do not make 1 equal chunks for 1 ranks; expected 1");
  EXPECT_EQ(error_of([] { context_positions(8, 4, 4, Balance::contiguous); }),
            "[context_parallel] there is no rank 4 among 4");
}

// Tiles that a rank computes with each holder's keys; a tile on the diagonal of a causal mask is half a tile of work.
struct Work {
  size_t tiles = 0, halves = 0;
  std::vector<size_t> by_hop;
};
Work work_of(int n, int rank, Balance balance, bool causal) {
  Work work;
  for (int hop = 0; hop < n; ++hop) {
    const std::vector<ChunkPair> pairs = chunk_pairs(n, rank, (rank + n - hop) % n, balance, causal);
    work.by_hop.push_back(pairs.size());
    work.tiles += pairs.size();
    for (const ChunkPair& pair : pairs) work.halves += causal && pair.query == pair.key ? 1 : 2;
  }
  return work;
}

TEST(ChunkPairs, ZigZagSharesTheWorkEvenly) {
  for (const int n : {2, 3, 4, 8})
    for (int rank = 0; rank < n; ++rank) {
      const Work even = work_of(n, rank, Balance::zigzag, true);
      EXPECT_EQ(even.tiles, 2 * static_cast<size_t>(n) + 1);
      EXPECT_EQ(even.halves, 4 * static_cast<size_t>(n));
      for (int hop = 1; hop < n; ++hop) EXPECT_EQ(even.by_hop[static_cast<size_t>(hop)], 2u);
      EXPECT_EQ(work_of(n, rank, Balance::contiguous, true).tiles, static_cast<size_t>(rank) + 1);
      EXPECT_EQ(work_of(n, rank, Balance::zigzag, false).tiles, 4 * static_cast<size_t>(n));
    }
}

TEST(ChunkPairs, AreThoseThatTheMaskLeaves) {
  for (const Balance balance : kBalances)
    for (const bool causal : {false, true})
      for (const int n : {2, 3, 5}) {
        std::set<std::pair<int, int>> seen;
        size_t count = 0;
        for (int rank = 0; rank < n; ++rank)
          for (int holder = 0; holder < n; ++holder)
            for (const ChunkPair& pair : chunk_pairs(n, rank, holder, balance, causal)) {
              seen.insert({pair.query, pair.key});
              ++count;
            }
        const int chunks = balance == Balance::zigzag ? 2 * n : n;
        std::set<std::pair<int, int>> expected;
        for (int query = 0; query < chunks; ++query)
          for (int key = 0; key < (causal ? query + 1 : chunks); ++key) expected.insert({query, key});
        EXPECT_EQ(seen, expected);
        EXPECT_EQ(count, expected.size());
      }
}

// --- bytes ---
struct Sizes {
  int64_t b = 2, tokens = 0;
  Heads heads = {24, 12};
  int64_t d = 3;
  DType dtype = DType::float32;
  int64_t queries() const { return b * tokens * heads.query * d; }  // elements of the whole sequence
  int64_t keys() const { return b * tokens * heads.key * d; }       // elements of the keys, or of the values
};

Var own_part(const Sizes& s, const Communicator& cp) {
  return Var(Tensor::zeros({s.b, s.tokens / cp.size(), s.heads.packed() * s.d}, s.dtype, make_arena()), true);
}

// Calls and bytes of this operation over all ranks; no other was used, but for receiving what was sent.
OpCount total(Communicator& cp, Op op) {
  const OpCounts counts = cp.counts();
  OpCounts others = counts;
  others[static_cast<size_t>(op)] = others[static_cast<size_t>(Op::recv)] = {};
  EXPECT_EQ(others, OpCounts{});
  const OpCount own = counts[static_cast<size_t>(op)], received = counts[static_cast<size_t>(Op::recv)];
  EXPECT_EQ(received, (OpCount{op == Op::send ? own.calls : 0, 0}));
  std::array<double, 2> sums{static_cast<double>(own.calls), static_cast<double>(own.sent)};
  cp.sum(sums);
  cp.reset_counts();
  return {static_cast<int64_t>(sums[0]), static_cast<int64_t>(sums[1])};
}

TEST(ContextParallel, TheRingMovesWhatTheFormulaSays) {
  for (const int n : {2, 3, 4})
    launch(ranks(n), [](Communicator& cp) {
      const int64_t c = cp.size();
      for (const DType dtype : {DType::float64, DType::float32, DType::bfloat16})
        for (const Balance balance : kBalances) {
          const Sizes s{.tokens = 10 * c, .dtype = dtype};
          const int64_t e = size_of(dtype), wide = dtype == DType::float64 ? 8 : 4;
          const Var qkv = own_part(s, cp);
          cp.reset_counts();
          const Var y = ring_attention(qkv, s.heads, {}, cp, balance);
          EXPECT_EQ(total(cp, Op::send), (OpCount{c * (c - 1), 2 * (c - 1) * e * s.keys()}));
          backward(y, {.seed = y.value().clone()});
          EXPECT_EQ(total(cp, Op::send), (OpCount{2 * c * (c - 1), 2 * (c - 1) * (e + wide) * s.keys()}));
        }
    });
}

TEST(ContextParallel, UlyssesMovesWhatTheFormulaSays) {
  for (const int n : {2, 3, 4})
    launch(ranks(n), [](Communicator& cp) {
      const int64_t c = cp.size();
      for (const DType dtype : {DType::float64, DType::bfloat16}) {
        const Sizes s{.tokens = 5 * c, .dtype = dtype};
        const OpCount expected{2 * c, 2 * (c - 1) * size_of(dtype) * (s.queries() + s.keys()) / c};
        const Var qkv = own_part(s, cp);
        cp.reset_counts();
        const Var y = ulysses_attention(qkv, s.heads, {}, cp);
        EXPECT_EQ(total(cp, Op::all_to_all), expected);
        backward(y, {.seed = y.value().clone()});
        EXPECT_EQ(total(cp, Op::all_to_all), expected);
      }
    });
}

// --- memory ---
TEST(ContextParallel, TheRingHoldsNothingOfTheWholeSequence) {
  for (const int n : {2, 4})
    launch(ranks(n), [](Communicator& cp) {
      for (const DType dtype : {DType::float32, DType::bfloat16}) {
        const Sizes s{.tokens = 32 * cp.size(), .dtype = dtype};
        const Var qkv = own_part(s, cp);
        Arena& arena = *qkv.value().arena();
        const int64_t own = s.queries() / cp.size(), part = s.keys() / cp.size(), e = size_of(dtype);
        const int64_t before = arena.usage(Category::activations).live;
        arena.reset_peaks();
        const Var y = ring_attention(qkv, s.heads, {}, cp, Balance::zigzag);
        const int64_t lse = 4 * s.b * s.heads.query * s.tokens / cp.size();
        EXPECT_EQ(arena.usage(Category::activations).live - before, e * own + lse);
        EXPECT_EQ(arena.usage(Category::communication).peak, 2 * e * part);  // k and v
        backward(y, {.seed = y.value().clone()});
        EXPECT_EQ(arena.usage(Category::communication).peak, (2 * e + 2 * 2 * 4) * part);  // dk and dv, here and coming
        EXPECT_EQ(arena.usage(Category::communication).live, 0);
      }
    });
}

// --- time ---
// "send kv", "recv dkv": gradients have twice the bytes of bfloat16 keys and values.
std::string name_of(const TraceEvent& event, int64_t kv_bytes) {
  return event.what + (event.bytes == kv_bytes ? " kv" : event.bytes == 2 * kv_bytes ? " dkv" : " something else");
}

// After keys and values are sent on comes the computing, between their arrival and their sending on nothing.
void expect_sent_before_computing(const Trace& trace, int64_t kv_bytes, const std::vector<std::string>& order) {
  const std::vector<TraceEvent> events = trace.events();
  ASSERT_EQ(events.size(), order.size());
  double least_work = 1e9, least_pause = 1e9;  // the least, since other programs may come between
  for (size_t i = 0; i < events.size(); ++i) {
    EXPECT_EQ(name_of(events[i], kv_bytes), order[i]) << i;
    if (i == 0) continue;
    const double between = events[i].requested - events[i - 1].end;
    if (order[i - 1] == "send kv") least_work = std::min(least_work, between);
    if (order[i - 1] == "recv kv" && order[i] == "send kv") least_pause = std::min(least_pause, between);
  }
  EXPECT_GT(least_work, 10 * least_pause);
}

TEST(ContextParallel, ABlockIsSentOnBeforeItIsComputedWith) {
  launch(ranks(4), [](Communicator& cp) {
    Trace there, back;
    const Sizes s{.b = 1, .tokens = 1024, .heads = {4}, .d = 32, .dtype = DType::bfloat16};
    const int64_t kv_bytes = 2 * 2 * s.keys() / cp.size();
    const Var qkv = own_part(s, cp);
    cp.set_trace(&there);
    const Var y = ring_attention(qkv, s.heads, {}, cp, Balance::zigzag);
    cp.set_trace(&back);
    backward(y, {.seed = y.value().clone()});
    cp.set_trace(nullptr);
    expect_sent_before_computing(there, kv_bytes, {"send kv", "recv kv", "send kv", "recv kv", "send kv", "recv kv"});
    expect_sent_before_computing(back, kv_bytes,
                                 {"send kv", "recv kv", "send kv", "send dkv", "recv kv", "send kv", "recv dkv",
                                  "send dkv", "recv kv", "recv dkv", "send dkv", "recv dkv"});
  });
}

// --- refusals ---
TEST(ContextParallel, WhatCannotBeIsRefused) {
  launch(ranks(2), [](Communicator& world) {
    const auto cp = world.split(0, world.rank(), "context");
    const auto qkv = [](const Shape& shape) { return Var(Tensor::zeros(shape, DType::float32, make_arena())); };
    EXPECT_EQ(error_of([&] {
                ulysses_attention(qkv({1, 2, 18}), {3}, {}, *cp);
              }),
              "[ulysses_attention] context axis: 2 ranks cannot share 3 heads evenly; expected 2 or 4");
    EXPECT_EQ(
        error_of([&] {
          ulysses_attention(qkv({1, 2, 18}), {4}, {}, *cp);
        }),
        "[attention] packed qkv is float32 (1, 2, 18); expected (B, T, (H + 2 K) D) of 4 heads of queries and 4 of "
        "keys and values");
    EXPECT_EQ(
        error_of([&] {
          ring_attention(qkv({1, 2, 18}), {4}, {}, *cp);
        }),
        "[attention] packed qkv is float32 (1, 2, 18); expected (B, T, (H + 2 K) D) of 4 heads of queries and 4 of "
        "keys and values");
    EXPECT_EQ(error_of([&] {
                ring_attention(qkv({1, 3, 18}), {3}, {}, *cp);
              }),
              "[ring_attention] context axis: a rank has 3 tokens; zig-zag takes an even number");
    AttentionOptions tile;
    tile.first_key = 2;
    EXPECT_EQ(error_of([&] {
                ring_attention(qkv({1, 2, 18}), {3}, tile, *cp);
              }),
              "[ring_attention] context axis: first_key and first_query are given; they follow from the ranks");
  });
}

}  // namespace
}  // namespace tessera
