// Ring attention and Ulysses: values and gradients equal those of one rank with the full sequence, on the CPU and on
// ranks that share a GPU; partitioning, traffic, memory and overlap.
#include "parallel/context_parallel.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "autograd/ops.h"
#include "parallel/comm/launch.h"
#include "parallel/comm/trace.h"
#include "tensor/kernels.h"
#include "tests/support/errors.h"
#include "tests/support/gpu.h"
#include "tests/support/tensors.h"

namespace tessera {
namespace {

enum class Mode : uint8_t { zigzag, contiguous, ulysses };
constexpr std::array<Mode, 3> kModes{Mode::zigzag, Mode::contiguous, Mode::ulysses};

SequencePartition sequence_partition(Mode mode) {
  return mode == Mode::zigzag ? SequencePartition::zigzag : SequencePartition::contiguous;
}
constexpr std::array kModeNames{"zig-zag ring", "contiguous ring", "ulysses"};

struct Problem {
  int64_t b = 2, tokens = 0;
  Heads heads = {24, 12};
  int64_t d = 3;
  AttentionOptions options = {};
  DType dtype = DType::float64;
  uint64_t name = 0;
  int64_t queries() const { return b * tokens * heads.query * d; }  // elements of the full sequence
  int64_t keys() const { return b * tokens * heads.key * d; }       // elements of the keys, or of the values
};

Tensor full_qkv(const Problem& p, const ArenaPtr& arena) {
  return test::normal({p.b, p.tokens, p.heads.packed() * p.d}, p.dtype, 2 * p.name, "context", arena);
}
Tensor full_seed(const Problem& p, const ArenaPtr& arena) {
  return test::normal({p.b, p.tokens, p.heads.query * p.d}, p.dtype, 2 * p.name + 1, "context", arena);
}

Tensor tokens_at(const Tensor& x, const std::vector<int64_t>& positions) {
  const Tensor y = x.make({x.dim(0), static_cast<int64_t>(positions.size()), x.dim(2)});
  for (size_t i = 0; i < positions.size(); ++i)
    y.narrow(1, static_cast<int64_t>(i), 1).copy_from(x.narrow(1, positions[i], 1));
  return y;
}

// Random document boundaries: for each token the start of its document.
Tensor sample_starts(const Problem& p, const ArenaPtr& arena) {
  const Tensor starts = Tensor::empty({p.b, p.tokens}, DType::int32, arena);
  const Philox random = Philox::named(p.name, "documents");
  for (int64_t i = 0; i < starts.numel(); ++i) {
    const bool begins = i % p.tokens == 0 || random.below(9, static_cast<uint64_t>(i)) == 0;
    starts.data<int32_t>()[i] = begins ? static_cast<int32_t>(i % p.tokens) : starts.data<int32_t>()[i - 1];
  }
  return starts;
}

struct Result {
  Tensor out, gradient;
};

Result alone(const Problem& p, const ArenaPtr& arena, DType dtype = DType::float64) {
  const Var qkv(full_qkv(p, arena).to(dtype), true);
  const Var y = packed_attention(qkv, p.heads, p.options);
  backward(y, {.seed = full_seed(p, arena).to(dtype)});
  return {y.value().on_host(), qkv.grad().on_host()};
}

Var attend(const Var& qkv, const Problem& p, Communicator& cp, Mode mode) {
  if (mode == Mode::ulysses) return ulysses_attention(qkv, p.heads, p.options, cp);
  AttentionOptions o = p.options;
  if (const Tensor& all = p.options.starts; all.defined()) {
    const std::vector<int64_t> mine = context_positions(p.tokens, cp.size(), cp.rank(), sequence_partition(mode));
    o.starts = tokens_at(all.reshape({p.b, p.tokens, 1}), mine).reshape({p.b, std::ssize(mine)});
  }
  return ring_attention(qkv, p.heads, o, cp, sequence_partition(mode));
}

Result run_parallel(const Problem& p, Communicator& cp, Mode mode, const ArenaPtr& arena, bool recomputed = false) {
  const std::vector<int64_t> mine = context_positions(p.tokens, cp.size(), cp.rank(), sequence_partition(mode));
  const Var qkv(tokens_at(full_qkv(p, arena->host()), mine).to(arena), true);
  const auto run = [&](const std::vector<Var>& v) { return attend(v[0], p, cp, mode); };
  const Var y = recomputed ? checkpoint(run, {qkv}) : run({qkv});
  backward(y, {.seed = tokens_at(full_seed(p, arena->host()), mine).to(arena)});
  return {y.value().on_host(), qkv.grad().on_host()};
}

std::string describe(const Problem& p, const Communicator& cp, Mode mode) {
  return fmt::format("{} on {} ranks of {} ({}, {}, {} / {} x {}), trial {}", kModeNames[static_cast<size_t>(mode)],
                     cp.size(), to_string(p.dtype), p.b, p.tokens, p.heads.query, p.heads.key, p.d, p.name);
}

// Every mode for this problem, compared with one rank in float64 on the same inputs.
void expect_matches_one_rank(const Problem& p, Communicator& cp, double of_out = 1e-12, double of_gradient = 1e-12) {
  const ArenaPtr arena = make_arena();
  const Result expected = alone(p, arena);
  for (const Mode mode : kModes) {
    const Result got = run_parallel(p, cp, mode, arena);
    const std::vector<int64_t> mine = context_positions(p.tokens, cp.size(), cp.rank(), sequence_partition(mode));
    const std::string what = describe(p, cp, mode);
    EXPECT_EQ(got.out.dtype(), p.dtype) << what;
    EXPECT_LE(test::apart(got.out, tokens_at(expected.out, mine)), of_out) << what;
    EXPECT_LE(test::apart(got.gradient, tokens_at(expected.gradient, mine)), of_gradient) << what;
  }
}

// Heads are divisible by c, tokens as both partitions require; offsets are as with tensor and data parallelism.
Problem random_problem(int ranks, uint64_t trial) {
  const Philox random = Philox::named(trial, "problem");
  const auto below = [&](uint64_t n, uint64_t i) {
    return static_cast<int64_t>(random.below(n, i, static_cast<uint64_t>(ranks)));
  };
  const int64_t keys = ranks * (1 + below(2, 1));
  Problem p{.b = 1 + below(3, 0), .heads = {keys * (1 + below(3, 12)), keys}, .d = 1 + below(20, 2)};
  p.tokens = 2 * ranks * std::array<int64_t, 5>{1, 3, 8, 20, 37}[static_cast<size_t>(below(5, 3))];
  p.name = trial;
  p.options.causal = below(4, 4) != 0;
  if (below(3, 5) == 0) p.options.scale = 0.3;
  if (below(3, 6) == 0) return p;
  p.options.dropout = 0.2;
  p.options.random = Philox(trial + 5);
  p.options.step = 3 + trial;
  p.options.first_sequence = below(5, 7);
  if (below(2, 8) == 0) return p;
  p.options.first_head = below(4, 9);
  p.options.heads_total = p.options.first_head + p.heads.query + below(3, 10);
  p.options.tokens_total = p.tokens + below(2, 11) * 11;
  return p;
}

LaunchOptions ranks(int n) { return {.ranks = n, .threads_per_rank = 1, .timeout_s = 300}; }

// Plain sequences; documents, where many ring tiles have no visible key for some queries; and windows within a chunk,
// over several chunks and longer than the sequence, also with documents.
TEST(ContextParallel, OneRankMatchesSeveralRanks) {
  for (const int n : {1, 2, 3, 4})
    launch(ranks(n), [](Communicator& cp) {
      for (uint64_t trial = 0; trial < 12; ++trial) expect_matches_one_rank(random_problem(cp.size(), trial), cp);
      for (uint64_t trial = 0; trial < 12; ++trial) {
        Problem p = random_problem(cp.size(), 100 + trial);
        p.options.starts = sample_starts(p, make_arena());
        expect_matches_one_rank(p, cp);
      }
      for (uint64_t trial = 0; trial < 16; ++trial) {
        Problem p = random_problem(cp.size(), 200 + trial);
        p.options.window = std::array<int64_t, 4>{1, 3, p.tokens / 2, p.tokens + 9}[trial % 4];
        if (trial % 3 == 0) p.options.starts = sample_starts(p, make_arena());
        expect_matches_one_rank(p, cp);
      }
    });
}

TEST(ContextParallel, EightRanksMatchOneRank) {
  launch(ranks(8), [](Communicator& cp) {
    Problem p = random_problem(8, 1);
    p.tokens = 48;
    p.options.dropout = 0.2;
    expect_matches_one_rank(p, cp);
  });
}

// Errors, as fractions of the largest value, are a few ulps, and slightly more for gradients, which are sums.
TEST(ContextParallel, NarrowDtypesMatchOneRankWithinRounding) {
  launch(ranks(4), [](Communicator& cp) {
    for (uint64_t trial = 0; trial < 8; ++trial) {
      Problem p = random_problem(cp.size(), trial);
      p.dtype = DType::float32;
      expect_matches_one_rank(p, cp, 2e-6, 4e-6);
      p.dtype = DType::bfloat16;
      expect_matches_one_rank(p, cp, 0x1p-7, 0x1p-7);
    }
  });
}

double squared_error(const Tensor& x, const Tensor& exact) {
  const std::vector<double> a = test::host_values(x), b = exact.to_vector<double>();
  double sum = 0;
  for (size_t i = 0; i < a.size(); ++i) sum += (a[i] - b[i]) * (a[i] - b[i]);
  return sum;
}

// Checks that the squared error of all ranks is at most `bound` times that of one rank in bfloat16.
void expect_error(const Problem& p, Communicator& cp, Mode mode, double bound, const ArenaPtr& arena) {
  const std::vector<int64_t> mine = context_positions(p.tokens, cp.size(), cp.rank(), sequence_partition(mode));
  const Result exact = alone(p, make_arena()), one = alone(p, arena, DType::bfloat16),
               got = run_parallel(p, cp, mode, arena);
  const auto relative_error = [&](const Tensor& x, const Tensor& full, const Tensor& of_one) {
    return cp.sum(squared_error(x, tokens_at(full, mine))) / squared_error(of_one, full);
  };
  EXPECT_LE(relative_error(got.out, exact.out, one.out), bound) << describe(p, cp, mode);
  EXPECT_LE(relative_error(got.gradient, exact.gradient, one.gradient), bound) << describe(p, cp, mode);
}

Problem in_bfloat16(int64_t tokens, const Heads& heads, int64_t d, const AttentionOptions& options = {}) {
  return {.b = 2, .tokens = tokens, .heads = heads, .d = d, .options = options, .dtype = DType::bfloat16};
}

// The error is no larger than one rank's, because partial results are merged and sent before rounding.
TEST(ContextParallel, Bfloat16ResultsAreRoundedOnce) {
  launch(ranks(4), [](Communicator& cp) {
    for (const Mode mode : kModes) expect_error(in_bfloat16(256, {8, 4}, 16), cp, mode, 1.05, make_arena());
  });
}

TEST(ContextParallel, MeshAxisMatchesOneRank) {
  launch(ranks(4), [](Communicator& world) {
    const auto cp = world.split(world.rank() % 2, world.rank(), "context");
    Problem p = random_problem(2, 7);
    p.options.dropout = 0.5;
    p.options.first_sequence = p.b * (world.rank() % 2);
    expect_matches_one_rank(p, *cp);
  });
}

TEST(ContextParallel, OneRankAxisMatchesPackedAttention) {
  launch({.ranks = 1}, [](Communicator& cp) {
    Problem p = random_problem(1, 3);
    p.tokens = 7;  // not divisible into equal chunks
    const ArenaPtr arena = make_arena();
    const Var qkv(full_qkv(p, arena));
    const std::vector<double> expected = packed_attention(qkv, p.heads, p.options).value().to_vector<double>();
    for (const Mode mode : kModes) EXPECT_EQ(attend(qkv, p, cp, mode).value().to_vector<double>(), expected);
    EXPECT_EQ(cp.counts(), OpCounts{});
  });
}

TEST(ContextParallel, RecomputationIsExact) {
  launch(ranks(3), [](Communicator& cp) {
    Problem p{.b = 2, .tokens = 36, .heads = {6, 3}, .d = 4, .options = {.dropout = 0.2, .random = Philox(4)}};
    const ArenaPtr arena = make_arena();
    for (const Mode mode : kModes) {
      const Result stored = run_parallel(p, cp, mode, arena), again = run_parallel(p, cp, mode, arena, true);
      EXPECT_EQ(again.out.to_vector<double>(), stored.out.to_vector<double>()) << describe(p, cp, mode);
      EXPECT_EQ(again.gradient.to_vector<double>(), stored.gradient.to_vector<double>()) << describe(p, cp, mode);
    }
  });
}

// --- fault detection ---
double output_difference(const Problem& wrong, const Problem& p, Communicator& cp, SequencePartition cut) {
  const ArenaPtr arena = make_arena();
  const std::vector<int64_t> mine = context_positions(p.tokens, cp.size(), cp.rank(), cut);
  const Var qkv(tokens_at(full_qkv(p, arena), mine));
  const Tensor out = ring_attention(qkv, wrong.heads, wrong.options, cp, SequencePartition::zigzag).value();
  return cp.max(test::apart(out, tokens_at(alone(p, arena).out, mine)));
}

TEST(ContextParallel, ComparisonDetectsFaults) {
  launch(ranks(3), [](Communicator& cp) {
    Problem p{.b = 2, .tokens = 24, .heads = {2}, .d = 5, .options = {.dropout = 0.2, .random = Philox(4)}};
    EXPECT_LE(output_difference(p, p, cp, SequencePartition::zigzag), 1e-12);
    EXPECT_GT(output_difference(p, p, cp, SequencePartition::contiguous),
              0.1);  // chunks in an order that the op does not expect
    Problem uncaused = p, masked = p, shifted = p;
    uncaused.options.causal = false;
    masked.options.tokens_total = p.tokens + 1;  // a different mask
    shifted.options.first_head = 1;
    for (const Problem& wrong : {uncaused, masked, shifted})
      EXPECT_GT(output_difference(wrong, p, cp, SequencePartition::zigzag), 0.1);
  });
}

// Partitioning, traffic, memory and overlap.

constexpr std::array<SequencePartition, 2> kBalances{SequencePartition::zigzag, SequencePartition::contiguous};

// --- tokens and chunks ---
TEST(ContextPositions, PartitionSequence) {
  using List = std::vector<int64_t>;
  EXPECT_EQ(context_positions(12, 3, 0, SequencePartition::zigzag), (List{0, 1, 10, 11}));
  EXPECT_EQ(context_positions(12, 3, 1, SequencePartition::zigzag), (List{2, 3, 8, 9}));
  EXPECT_EQ(context_positions(12, 3, 2, SequencePartition::zigzag), (List{4, 5, 6, 7}));
  EXPECT_EQ(context_positions(12, 3, 1, SequencePartition::contiguous), (List{4, 5, 6, 7}));
  EXPECT_EQ(context_positions(5, 1, 0, SequencePartition::zigzag), (List{0, 1, 2, 3, 4}));
  for (const SequencePartition balance : kBalances)
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

TEST(ContextPositions, RejectIndivisibleSequences) {
  const auto refusal = [](int64_t tokens, int n, int rank, SequencePartition balance) {
    return error_message([&] { context_positions(tokens, n, rank, balance); });
  };
  const std::string head = "[context_parallel] ", make = " tokens are not divisible into ";
  EXPECT_EQ(refusal(20, 4, 0, SequencePartition::zigzag),
            head + "20" + make + "8 equal chunks for 4 ranks; nearest valid value: 16 or 24");
  EXPECT_EQ(refusal(3, 4, 0, SequencePartition::contiguous),
            head + "3" + make + "4 equal chunks for 4 ranks; nearest valid value: 4");
  EXPECT_EQ(refusal(0, 1, 0, SequencePartition::zigzag),
            head + "0" + make + "1 equal chunks for 1 ranks; nearest valid value: 1");
  EXPECT_EQ(refusal(8, 4, 4, SequencePartition::contiguous), head + "rank out of range: 4 of 4");
}

// Tiles that a rank computes with each holder's keys; a tile on the diagonal of a causal mask counts as half.
struct Work {
  size_t tiles = 0, halves = 0;
  std::vector<size_t> by_hop;
};
Work count_work(int n, int rank, SequencePartition balance, bool causal) {
  Work work;
  for (int hop = 0; hop < n; ++hop) {
    const std::vector<ChunkPair> pairs = chunk_pairs(n, rank, (rank + n - hop) % n, balance, causal);
    work.by_hop.push_back(pairs.size());
    work.tiles += pairs.size();
    for (const ChunkPair& pair : pairs) work.halves += causal && pair.query == pair.key ? 1 : 2;
  }
  return work;
}

TEST(ChunkPairs, ZigZagBalancesWork) {
  for (const int n : {2, 3, 4, 8})
    for (int rank = 0; rank < n; ++rank) {
      const Work even = count_work(n, rank, SequencePartition::zigzag, true);
      EXPECT_EQ(even.tiles, 2 * static_cast<size_t>(n) + 1);
      EXPECT_EQ(even.halves, 4 * static_cast<size_t>(n));
      for (int hop = 1; hop < n; ++hop) EXPECT_EQ(even.by_hop[static_cast<size_t>(hop)], 2u);
      EXPECT_EQ(count_work(n, rank, SequencePartition::contiguous, true).tiles, static_cast<size_t>(rank) + 1);
      EXPECT_EQ(count_work(n, rank, SequencePartition::zigzag, false).tiles, 4 * static_cast<size_t>(n));
    }
}

TEST(ChunkPairs, CoverUnmaskedTiles) {
  for (const SequencePartition balance : kBalances)
    for (const bool causal : {false, true})
      for (const int n : {2, 3, 5}) {
        std::set<std::pair<int, int>> observed;
        size_t count = 0;
        for (int rank = 0; rank < n; ++rank)
          for (int holder = 0; holder < n; ++holder)
            for (const ChunkPair& pair : chunk_pairs(n, rank, holder, balance, causal)) {
              observed.insert({pair.query, pair.key});
              ++count;
            }
        const int chunks = balance == SequencePartition::zigzag ? 2 * n : n;
        std::set<std::pair<int, int>> expected;
        for (int query = 0; query < chunks; ++query)
          for (int key = 0; key < (causal ? query + 1 : chunks); ++key) expected.insert({query, key});
        EXPECT_EQ(observed, expected);
        EXPECT_EQ(count, expected.size());
      }
}

// --- bytes ---
Var own_part(const Problem& s, const Communicator& cp) {
  return Var(Tensor::zeros({s.b, s.tokens / cp.size(), s.heads.packed() * s.d}, s.dtype, make_arena()), true);
}

// Calls and bytes of this operation over all ranks; fails if any operation but this one and recv was used.
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

// Checks the counts after the forward and after the backward pass.
void expect_moved(const Problem& s, Communicator& cp, Mode mode, Op op, const OpCount& there, const OpCount& back) {
  SCOPED_TRACE(describe(s, cp, mode));
  const Var qkv = own_part(s, cp);
  cp.reset_counts();
  const Var y = attend(qkv, s, cp, mode);
  EXPECT_EQ(total(cp, op), there);
  backward(y, {.seed = y.value().clone()});
  EXPECT_EQ(total(cp, op), back);
}

TEST(ContextParallel, TrafficMatchesFormulas) {
  for (const int n : {2, 3, 4})
    launch(ranks(n), [](Communicator& cp) {
      const int64_t c = cp.size();
      for (const DType dtype : {DType::float64, DType::float32, DType::bfloat16}) {
        const int64_t e = element_size(dtype), wide = dtype == DType::float64 ? 8 : 4;
        Problem s{.tokens = 10 * c, .dtype = dtype};
        for (const Mode mode : {Mode::zigzag, Mode::contiguous})
          expect_moved(s, cp, mode, Op::send, {c * (c - 1), 2 * (c - 1) * e * s.keys()},
                       {2 * c * (c - 1), 2 * (c - 1) * (e + wide) * s.keys()});
        s.tokens = 5 * c;
        const OpCount exchanged{2 * c, 2 * (c - 1) * e * (s.queries() + s.keys()) / c};
        expect_moved(s, cp, Mode::ulysses, Op::all_to_all, exchanged, exchanged);
      }
    });
}

// --- memory ---
TEST(ContextParallel, RingAllocatesNoFullSequence) {
  for (const int n : {2, 4})
    launch(ranks(n), [](Communicator& cp) {
      for (const DType dtype : {DType::float32, DType::bfloat16}) {
        const Problem s{.tokens = 32 * cp.size(), .dtype = dtype};
        const Var qkv = own_part(s, cp);
        Arena& arena = *qkv.value().arena();
        const int64_t own = s.queries() / cp.size(), part = s.keys() / cp.size(), e = element_size(dtype);
        const int64_t before = arena.usage(Category::activations).live;
        arena.reset_peaks();
        const Var y = ring_attention(qkv, s.heads, {}, cp, SequencePartition::zigzag);
        const int64_t lse = 4 * s.b * s.heads.query * s.tokens / cp.size();
        EXPECT_EQ(arena.usage(Category::activations).live - before, e * own + lse);
        EXPECT_EQ(arena.usage(Category::communication).peak, 2 * e * part);  // k and v
        backward(y, {.seed = y.value().clone()});
        EXPECT_EQ(arena.usage(Category::communication).peak,
                  (2 * e + 2 * 2 * 4) * part);  // dk and dv, local and arriving
        EXPECT_EQ(arena.usage(Category::communication).live, 0);
      }
    });
}

// --- time ---
// "send kv", "recv dkv": gradients are twice as large as bfloat16 keys and values.
std::string to_string(const TraceEvent& event, int64_t kv_bytes) {
  return event.what + (event.bytes == kv_bytes ? " kv" : event.bytes == 2 * kv_bytes ? " dkv" : " something else");
}

// Keys and values are sent before they are used: nothing is computed between their arrival and their sending.
void expect_sent_before_computing(const Trace& trace, int64_t kv_bytes, const std::vector<std::string>& order) {
  const std::vector<TraceEvent> events = trace.events();
  ASSERT_EQ(events.size(), order.size());
  double min_work = 1e9, min_pause = 1e9;  // minima, because other programs may interrupt
  for (size_t i = 0; i < events.size(); ++i) {
    EXPECT_EQ(to_string(events[i], kv_bytes), order[i]) << i;
    if (i == 0) continue;
    const double between = events[i].requested - events[i - 1].end;
    if (order[i - 1] == "send kv") min_work = std::min(min_work, between);
    if (order[i - 1] == "recv kv" && order[i] == "send kv") min_pause = std::min(min_pause, between);
  }
  EXPECT_GT(min_work, 10 * min_pause);
}

TEST(ContextParallel, KeyValueBlocksAreForwardedBeforeUse) {
  launch(ranks(4), [](Communicator& cp) {
    Trace there, back;
    const Problem s{.b = 1, .tokens = 1024, .heads = {4}, .d = 32, .dtype = DType::bfloat16};
    const int64_t kv_bytes = 2 * 2 * s.keys() / cp.size();
    const Var qkv = own_part(s, cp);
    cp.set_trace(&there);
    const Var y = ring_attention(qkv, s.heads, {}, cp, SequencePartition::zigzag);
    cp.set_trace(&back);
    backward(y, {.seed = y.value().clone()});
    cp.set_trace(nullptr);
    expect_sent_before_computing(there, kv_bytes, {"send kv", "recv kv", "send kv", "recv kv", "send kv", "recv kv"});
    expect_sent_before_computing(back, kv_bytes,
                                 {"send kv", "recv kv", "send kv", "send dkv", "recv kv", "send kv", "recv dkv",
                                  "send dkv", "recv kv", "recv dkv", "send dkv", "recv dkv"});
  });
}

// --- invalid arguments ---
TEST(ContextParallel, RejectsInvalidArguments) {
  launch(ranks(2), [](Communicator& world) {
    const auto cp = world.split(0, world.rank(), "context");
    const auto refusal = [&](bool ring, int64_t tokens, int64_t heads, const AttentionOptions& options = {}) {
      const Var qkv(Tensor::zeros({1, tokens, 18}, DType::float32, make_arena()));
      return error_message(
          [&] { ring ? ring_attention(qkv, {heads}, options, *cp) : ulysses_attention(qkv, {heads}, options, *cp); });
    };
    EXPECT_EQ(refusal(false, 2, 3),
              "[ulysses_attention] context axis: 2 ranks do not divide 3 heads; nearest valid value: 2 or 4");
    for (const bool ring : {false, true})
      EXPECT_EQ(refusal(ring, 2, 4),
                "[attention] packed qkv is float32 (1, 2, 18); expected (B, T, (H + 2 K) D) with 4 query heads and "
                "4 key-value heads");
    EXPECT_EQ(refusal(true, 3, 3),
              "[ring_attention] context axis: a rank has 3 tokens; zig-zag requires an even number");
    EXPECT_EQ(
        refusal(true, 2, 3, {.first_key = 2}),
        "[ring_attention] context axis: first_key and first_query must not be set; they are derived from the ranks");
  });
}

// Ranks that share a GPU, compared with one rank in float64 on the CPU: custom kernels with unrounded partial results,
// and bfloat16 partial results as in cuDNN's kernels.
using ContextParallelGpu = test::OnGpu;

void expect_error_on_gpu(int n, int64_t tokens, const Heads& heads, double bound, Mode mode = Mode::zigzag,
                         AttentionKernels kernels = AttentionKernels::own, const AttentionOptions& options = {}) {
  launch(ranks(n), [&](Communicator& cp) {
    const ArenaPtr gpu = make_arena(Device::cuda);
    gpu->local<KernelChoice>().attention = kernels;
    expect_error(in_bfloat16(tokens, heads, 64, options), cp, mode, bound, gpu);
    EXPECT_EQ(gpu->local<KernelLog>().forward.plain, 0);
    cp.barrier();
  });
}

// The last case selects kernels automatically, so it rounds every partial result to bfloat16, as cuDNN does.
TEST_F(ContextParallelGpu, RingErrorStaysWithinBoundWithAndWithoutTileRounding) {
  for (const int n : {2, 3})
    for (const Heads& heads : {Heads{2}, Heads{2, 1}}) {
      expect_error_on_gpu(n, 64 * n, heads, 1.05);
      expect_error_on_gpu(n, 20 * n, heads, 1.05, Mode::zigzag, AttentionKernels::own, {.causal = false});
      expect_error_on_gpu(n, 64 * n, heads, 2.2, Mode::zigzag, AttentionKernels::automatic);
    }
}

TEST_F(ContextParallelGpu, UlyssesErrorMatchesOneRankAttention) {
  expect_error_on_gpu(2, 64, {4, 2}, 1.05, Mode::ulysses);
  expect_error_on_gpu(3, 96, {3}, 1.05, Mode::ulysses);
}

// Two ranks make two calls each; with dropout, which depends on positions, five, one per pair of chunks.
TEST_F(ContextParallelGpu, RingCallsAttentionOncePerHop) {
  for (const double dropout : {0.0, 0.5})
    launch(ranks(2), [&](Communicator& cp) {
      const ArenaPtr gpu = make_arena(Device::cuda);
      run_parallel(in_bfloat16(64, {1}, 64, {.dropout = dropout, .random = Philox(3)}), cp, Mode::zigzag, gpu);
      const KernelLog& log = gpu->local<KernelLog>();
      EXPECT_EQ(log.forward.tensor_cores, dropout == 0 ? 2 : 5);
      EXPECT_EQ(log.backward.tensor_cores, dropout == 0 ? 2 : 5);
      cp.barrier();
    });
}

}  // namespace
}  // namespace tessera
