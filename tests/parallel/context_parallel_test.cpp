// Ring attention and Ulysses: values and gradients are those of one rank that has the whole sequence.
#include "parallel/context_parallel.h"

#include <gtest/gtest.h>

#include "autograd/ops.h"
#include "parallel/comm/launch.h"

namespace tessera {
namespace {

enum class Way : uint8_t { zigzag, contiguous, ulysses };
constexpr std::array<Way, 3> kWays{Way::zigzag, Way::contiguous, Way::ulysses};

Balance balance_of(Way way) { return way == Way::zigzag ? Balance::zigzag : Balance::contiguous; }
std::string name_of_way(Way way) {
  return way == Way::zigzag ? "zig-zag ring" : way == Way::contiguous ? "contiguous ring" : "ulysses";
}

struct Problem {
  int64_t b, tokens;
  Heads heads;
  int64_t d;
  AttentionOptions options;
  DType dtype = DType::float64;
  uint64_t name = 0;
};

Tensor normal(const Shape& shape, DType dtype, const ArenaPtr& arena, uint64_t name) {
  const Tensor t = Tensor::empty(shape, DType::float64, arena);
  const Philox random = Philox::named(name, "context");
  for (int64_t i = 0; i < t.numel(); ++i) t.data<double>()[i] = random.normal(static_cast<uint64_t>(i));
  return t.to(dtype);
}
Tensor whole_qkv(const Problem& p, const ArenaPtr& arena) {
  return normal({p.b, p.tokens, p.heads.packed() * p.d}, p.dtype, arena, 2 * p.name);
}
Tensor whole_seed(const Problem& p, const ArenaPtr& arena) {
  return normal({p.b, p.tokens, p.heads.query * p.d}, p.dtype, arena, 2 * p.name + 1);
}

// The tokens at these positions of (B, T, C).
Tensor tokens_at(const Tensor& x, const std::vector<int64_t>& positions) {
  const Tensor y = x.make({x.dim(0), static_cast<int64_t>(positions.size()), x.dim(2)});
  for (size_t i = 0; i < positions.size(); ++i)
    y.narrow(1, static_cast<int64_t>(i), 1).copy_from(x.narrow(1, positions[i], 1));
  return y;
}

// Documents of random lengths in each sequence: where that of each token begins.
Tensor draw_starts(const Problem& p, const ArenaPtr& arena) {
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
  const Var qkv(whole_qkv(p, arena).to(dtype), true);
  const Var y = packed_attention(qkv, p.heads, p.options);
  backward(y, {.seed = whole_seed(p, arena).to(dtype)});
  return {y.value(), qkv.grad()};
}

Var attend(const Var& qkv, const Problem& p, Communicator& cp, Way way) {
  if (way == Way::ulysses) return ulysses_attention(qkv, p.heads, p.options, cp);
  AttentionOptions o = p.options;
  if (const Tensor& all = p.options.starts; all.defined()) {
    const std::vector<int64_t> mine = context_positions(p.tokens, cp.size(), cp.rank(), balance_of(way));
    o.starts = tokens_at(all.reshape({p.b, p.tokens, 1}), mine).reshape({p.b, std::ssize(mine)});
  }
  return ring_attention(qkv, p.heads, o, cp, balance_of(way));
}

Result together(const Problem& p, Communicator& cp, Way way, const ArenaPtr& arena) {
  const std::vector<int64_t> mine = context_positions(p.tokens, cp.size(), cp.rank(), balance_of(way));
  const Var qkv(tokens_at(whole_qkv(p, arena), mine), true);
  const Var y = attend(qkv, p, cp, way);
  backward(y, {.seed = tokens_at(whole_seed(p, arena), mine)});
  return {y.value(), qkv.grad()};
}

// The largest difference as a share of the largest value of the whole.
double difference(const Tensor& part, const Tensor& whole, const std::vector<int64_t>& positions) {
  const Tensor expected = tokens_at(whole, positions);
  EXPECT_EQ(part.shape(), expected.shape());
  const std::vector<double> x = part.to(DType::float64).to_vector<double>(), y = expected.to_vector<double>();
  double most = 0, largest = 1e-300;
  for (size_t i = 0; i < x.size(); ++i) most = std::max(most, std::isfinite(x[i]) ? std::abs(x[i] - y[i]) : INFINITY);
  for (const double v : whole.to_vector<double>()) largest = std::max(largest, std::abs(v));
  return most / largest;
}

struct Bounds {
  double out = 1e-12, gradient = 1e-12;
};

// Every way of this problem, against one rank in float64 with the same inputs.
void expect_as_alone(const Problem& p, Communicator& cp, const Bounds& bounds = {}) {
  const ArenaPtr arena = make_arena();
  const Result expected = alone(p, arena);
  for (const Way way : kWays) {
    const Result got = together(p, cp, way, arena);
    const std::vector<int64_t> mine = context_positions(p.tokens, cp.size(), cp.rank(), balance_of(way));
    const std::string what =
        name_of_way(way) + " on " + std::to_string(cp.size()) + " ranks of " + std::string(name_of(p.dtype)) + " (" +
        std::to_string(p.b) + ", " + std::to_string(p.tokens) + ", " + std::to_string(p.heads.query) + " / " +
        std::to_string(p.heads.key) + " x " + std::to_string(p.d) + "), trial " + std::to_string(p.name);
    EXPECT_EQ(got.out.dtype(), p.dtype) << what;
    EXPECT_LE(difference(got.out, expected.out, mine), bounds.out) << what;
    EXPECT_LE(difference(got.gradient, expected.gradient, mine), bounds.gradient) << what;
  }
}

// Heads that c ranks can share, tokens for either way to cut; offsets as tensor and data parallelism give them.
Problem draw(int ranks, uint64_t trial) {
  const Philox random = Philox::named(trial, "problem");
  const auto below = [&](uint64_t n, uint64_t i) {
    return static_cast<int64_t>(random.below(n, i, static_cast<uint64_t>(ranks)));
  };
  const int64_t keys = ranks * (1 + below(2, 1));
  Problem p{.b = 1 + below(3, 0),
            .tokens = 0,
            .heads = {keys * (1 + below(3, 12)), keys},
            .d = 1 + below(20, 2),
            .options = {}};
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

LaunchOptions ranks(int n) { return {.ranks = n, .threads_per_rank = 1, .timeout_s = 120}; }

TEST(ContextParallel, OneRankAndManyAgree) {
  for (const int n : {1, 2, 3, 4})
    launch(ranks(n), [](Communicator& cp) {
      for (uint64_t trial = 0; trial < 12; ++trial) expect_as_alone(draw(cp.size(), trial), cp);
    });
}

// Many tiles of a ring hold no key that some of their queries see.
TEST(ContextParallel, DocumentsAreNotCrossed) {
  for (const int n : {1, 2, 3, 4})
    launch(ranks(n), [](Communicator& cp) {
      for (uint64_t trial = 0; trial < 12; ++trial) {
        Problem p = draw(cp.size(), 100 + trial);
        p.options.starts = draw_starts(p, make_arena());
        expect_as_alone(p, cp);
      }
    });
}

// Windows of documents too; within a chunk, over a few of them, and longer than all.
TEST(ContextParallel, WindowsAreKept) {
  for (const int n : {1, 2, 3, 4})
    launch(ranks(n), [](Communicator& cp) {
      for (uint64_t trial = 0; trial < 16; ++trial) {
        Problem p = draw(cp.size(), 200 + trial);
        p.options.window = std::array<int64_t, 4>{1, 3, p.tokens / 2, p.tokens + 9}[trial % 4];
        if (trial % 3 == 0) p.options.starts = draw_starts(p, make_arena());
        expect_as_alone(p, cp);
      }
    });
}

TEST(ContextParallel, EightRanks) {
  launch(ranks(8), [](Communicator& cp) {
    Problem p = draw(8, 1);
    p.tokens = 48;
    p.options.dropout = 0.2;
    expect_as_alone(p, cp);
  });
}

// Bounds, as a share of the largest value: a few units of the last place of what is rounded, and of sums of gradients.
TEST(ContextParallel, NarrowTypesAreNear) {
  launch(ranks(4), [](Communicator& cp) {
    for (uint64_t trial = 0; trial < 8; ++trial) {
      Problem p = draw(cp.size(), trial);
      p.dtype = DType::float32;
      expect_as_alone(p, cp, {.out = 2e-6, .gradient = 4e-6});
      p.dtype = DType::bfloat16;
      expect_as_alone(p, cp, {.out = 0x1p-7, .gradient = 0x1p-7});
    }
  });
}

double squared_error(const Tensor& x, const Tensor& exact) {
  const std::vector<double> a = x.to(DType::float64).to_vector<double>(), b = exact.to_vector<double>();
  double sum = 0;
  for (size_t i = 0; i < a.size(); ++i) sum += (a[i] - b[i]) * (a[i] - b[i]);
  return sum;
}

// No more error than one rank makes: parts are merged, carried around and added before anything is rounded.
TEST(ContextParallel, BfloatIsRoundedOnce) {
  launch(ranks(4), [](Communicator& cp) {
    const Problem p{.b = 2, .tokens = 256, .heads = {8, 4}, .d = 16, .options = {}, .dtype = DType::bfloat16};
    const ArenaPtr arena = make_arena();
    const Result exact = alone(p, arena), one = alone(p, arena, DType::bfloat16);
    for (const Way way : kWays) {
      const std::vector<int64_t> mine = context_positions(p.tokens, cp.size(), cp.rank(), balance_of(way));
      const Result got = together(p, cp, way, arena);
      EXPECT_LE(cp.sum(squared_error(got.out, tokens_at(exact.out, mine))), 1.05 * squared_error(one.out, exact.out));
      EXPECT_LE(cp.sum(squared_error(got.gradient, tokens_at(exact.gradient, mine))),
                1.05 * squared_error(one.gradient, exact.gradient));
    }
  });
}

TEST(ContextParallel, AlongAnAxisOfAMesh) {
  launch(ranks(4), [](Communicator& world) {
    const auto cp = world.split(world.rank() % 2, world.rank(), "context");
    Problem p = draw(2, 7);
    p.options.dropout = 0.5;
    p.options.first_sequence = p.b * (world.rank() % 2);
    expect_as_alone(p, *cp);
  });
}

TEST(ContextParallel, AnAxisOfOneIsPackedAttention) {
  launch({.ranks = 1}, [](Communicator& cp) {
    Problem p = draw(1, 3);
    p.tokens = 7;  // no two equal chunks
    const ArenaPtr arena = make_arena();
    const Var qkv(whole_qkv(p, arena));
    const std::vector<double> expected = packed_attention(qkv, p.heads, p.options).value().to_vector<double>();
    for (const Way way : kWays) EXPECT_EQ(attend(qkv, p, cp, way).value().to_vector<double>(), expected);
    EXPECT_EQ(cp.counts(), OpCounts{});
  });
}

TEST(ContextParallel, RecomputingChangesNoBit) {
  launch(ranks(3), [](Communicator& cp) {
    Problem p{.b = 2, .tokens = 36, .heads = {6, 3}, .d = 4, .options = {.dropout = 0.2, .random = Philox(4)}};
    const ArenaPtr arena = make_arena();
    for (const Way way : kWays) {
      const std::vector<int64_t> mine = context_positions(p.tokens, cp.size(), cp.rank(), balance_of(way));
      const Result kept = together(p, cp, way, arena);
      const Var qkv(tokens_at(whole_qkv(p, arena), mine), true);
      const Var y = checkpoint([&](const std::vector<Var>& v) { return attend(v[0], p, cp, way); }, {qkv});
      backward(y, {.seed = tokens_at(whole_seed(p, arena), mine)});
      EXPECT_EQ(y.value().to_vector<double>(), kept.out.to_vector<double>()) << name_of_way(way);
      EXPECT_EQ(qkv.grad().to_vector<double>(), kept.gradient.to_vector<double>()) << name_of_way(way);
    }
  });
}

// --- what would be wrong is seen ---
double output_difference(const Problem& told, const Problem& p, Communicator& cp, Balance cut) {
  const ArenaPtr arena = make_arena();
  const std::vector<int64_t> mine = context_positions(p.tokens, cp.size(), cp.rank(), cut);
  const Var qkv(tokens_at(whole_qkv(p, arena), mine));
  const Tensor out = ring_attention(qkv, told.heads, told.options, cp, Balance::zigzag).value();
  return cp.max(difference(out, alone(p, arena).out, mine));
}

TEST(ContextParallel, DefectsAreSeen) {
  launch(ranks(3), [](Communicator& cp) {
    Problem p{.b = 2, .tokens = 24, .heads = {2}, .d = 5, .options = {.dropout = 0.2, .random = Philox(4)}};
    EXPECT_LE(output_difference(p, p, cp, Balance::zigzag), 1e-12);
    EXPECT_GT(output_difference(p, p, cp, Balance::contiguous), 0.01);  // chunks in another order than the op thinks
    Problem told = p;
    told.options.causal = false;
    EXPECT_GT(output_difference(told, p, cp, Balance::zigzag), 0.01);
    told = p;
    told.options.tokens_total = p.tokens + 1;
    EXPECT_GT(output_difference(told, p, cp, Balance::zigzag), 0.01);  // another mask
    told = p;
    told.options.first_head = 1;
    EXPECT_GT(output_difference(told, p, cp, Balance::zigzag), 0.01);
  });
}

}  // namespace
}  // namespace tessera
