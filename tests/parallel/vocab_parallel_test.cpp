// The sharded vocabulary: lookup, and cross-entropy without full rows of logits; extreme values in it and in context
// parallelism.

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <initializer_list>
#include <string>
#include <vector>

#include "parallel/comm/launch.h"
#include "parallel/context_parallel.h"
#include "parallel/tensor_parallel.h"
#include "tests/support/errors.h"
#include "tests/support/gpu.h"
#include "tests/support/plain_attention.h"
#include "tests/support/tensors.h"

namespace tessera {
namespace {

using namespace test;  // NOLINT

Tensor normal(const Shape& shape, uint64_t name, DType dtype, const ArenaPtr& arena) {
  return scale(test::normal(shape, DType::float64, name, "vocab", arena), 3).to(dtype);
}

Tensor random_ids(int64_t n, int64_t vocab, bool ignore_some, const ArenaPtr& arena) {
  const Tensor t = Tensor::empty({n}, DType::int32, arena);
  const Philox random = Philox::named(static_cast<uint64_t>(n + vocab), "ids");
  for (int64_t i = 0; i < n; ++i) {
    const auto at = static_cast<uint64_t>(i);
    t.data<int32_t>()[i] = ignore_some && random.below(5, at, 1) == 0
                               ? -1
                               : static_cast<int32_t>(random.below(static_cast<uint64_t>(vocab), at));
  }
  return t;
}

Tensor part(const Tensor& full, int dim, const Communicator& tp) {
  const Range own = chunk_range(full.dim(dim), tp.size(), tp.rank());
  return full.narrow(dim, own.begin, own.size()).clone();
}

void check_loss(Communicator& tp, int64_t rows, int64_t vocab, DType dtype, double bound) {
  const ArenaPtr arena = make_arena();
  const std::string what = fmt::format("{} rows of {} in {} over {}", rows, vocab, to_string(dtype), tp.size());
  const Var full(normal({rows, vocab}, static_cast<uint64_t>(rows), dtype, arena), true);
  const Var own(part(full.value(), 1, tp), true);
  const Tensor targets = random_ids(rows, vocab, true, arena);
  const Loss expected = cross_entropy(scale(full, 1), targets, 0.3);
  tp.reset_counts();
  const Loss got = vocab_parallel_cross_entropy(scale(own, 1), targets, 0.3, tp, vocab);
  // Only the maximum, the sum and the target's logit of each row are reduced.
  const int64_t wide = dtype == DType::float64 ? 8 : 4, n = tp.size();
  const OpCount reduced = tp.counts()[static_cast<size_t>(Op::all_reduce)];
  EXPECT_EQ(reduced.calls, n > 1 ? 3 : 0) << what;
  EXPECT_EQ(tp.sum(static_cast<double>(reduced.sent)), static_cast<double>(3 * 2 * (n - 1) * rows * wide)) << what;
  EXPECT_NEAR(got.loss_sum, expected.loss_sum, bound * expected.loss_sum) << what;
  EXPECT_EQ(got.count, expected.count) << what;
  EXPECT_EQ(got.mean.value().item<double>(), got.loss_sum * 0.3) << what;
  EXPECT_EQ(tp.max(got.loss_sum), got.loss_sum) << what;
  EXPECT_EQ(-tp.max(-got.loss_sum), got.loss_sum) << what;
  backward(expected.mean);
  backward(got.mean);
  EXPECT_LE(test::distance(own.grad(), part(full.grad(), 1, tp)), bound) << what;
}

TEST(VocabParallel, LossAndGradientMatchUnshardedLogits) {
  for (const int ranks : {1, 2, 3, 4})
    launch({.ranks = ranks, .threads_per_rank = 1, .timeout_s = 60}, [&](Communicator& tp) {
      const Philox random = Philox::named(9, "sizes");
      for (uint64_t trial = 0; trial < 8; ++trial) {
        const auto rows = 1 + static_cast<int64_t>(random.below(20, trial));
        const auto vocab = ranks + static_cast<int64_t>(random.below(90, trial, 1));
        check_loss(tp, rows, vocab, DType::float64, 1e-14);
        check_loss(tp, rows, vocab, DType::float32, 1e-6);
        check_loss(tp, rows, vocab, DType::bfloat16, 1e-2);
      }
      check_loss(tp, 3, 9001, DType::float64, 1e-14);
    });
}

// The exponentials of these logits overflow unless the global maximum is subtracted.
TEST(VocabParallel, MaximumIsReducedOverAllRanks) {
  launch({.ranks = 2, .threads_per_rank = 1, .timeout_s = 20}, [](Communicator& tp) {
    const ArenaPtr arena = make_arena();
    const std::vector<float> mine = tp.rank() == 0 ? std::vector<float>{-2000, 10} : std::vector<float>{2000, 1999};
    const Tensor targets = Tensor::zeros({1}, DType::int32, arena);
    const Var logits(Tensor::of<float>(mine, {1, 2}, arena), true);
    const Loss loss = vocab_parallel_cross_entropy(logits, targets, 1, tp, 4);
    EXPECT_NEAR(loss.loss_sum, 4000 + std::log(1 + std::exp(-1.0)), 1e-3);
    backward(loss.mean);
    const double first = 1 / (1 + std::exp(-1.0));
    const std::vector<double> expected =
        tp.rank() == 0 ? std::vector<double>{-1, 0} : std::vector<double>{first, 1 - first};
    for (size_t j = 0; j < 2; ++j)
      EXPECT_NEAR(logits.grad().to_vector<float>()[j], expected[j], 1e-4);  // the row's log-sum-exp is rounded
  });
}

// No second tensor of the logits' size is allocated, unless the logits' storage is shared.
TEST(VocabParallel, GradientOverwritesLogits) {
  launch({.ranks = 2, .threads_per_rank = 1, .timeout_s = 20}, [](Communicator& tp) {
    const ArenaPtr arena = make_arena();
    const Var x(normal({8, 5}, 1, DType::float32, arena), true);
    const Tensor targets = random_ids(8, 10, false, arena);
    for (const bool held : {false, true}) {
      Tensor made = x.value().clone();
      const std::byte* const memory = made.raw();
      const Tensor holder = held ? made : Tensor(), before = made.clone();
      const std::byte* gradient = nullptr;
      Var logits = record_one("watch", std::move(made), {x}, [&](Grads& g) { gradient = g.output().raw(); });
      backward(vocab_parallel_cross_entropy(std::move(logits), targets, 1, tp, 10).mean);
      EXPECT_EQ(gradient == memory, !held);
      EXPECT_EQ((held ? holder : before).to_vector<float>(), before.to_vector<float>());
    }
  });
}

void check_lookup(Communicator& tp, int64_t n, int64_t vocab, const Placement& between) {
  const ArenaPtr arena = make_arena();
  const std::string what = std::to_string(n) + " ids of " + std::to_string(vocab) + ", " + between.str();
  const Var full(normal({vocab, 5}, 2, DType::float64, arena), true);
  const Var own(part(full.value(), 0, tp), true);
  const Tensor ids = random_ids(n, vocab, false, arena).reshape({1, n});
  const Tensor weights = normal({1, n, 5}, 4, DType::float64, arena);
  const Var expected = embedding(ids, full), got = join(vocab_parallel_embedding(ids, own, tp, vocab), tp, between);
  const bool sharded = !(between == I);
  EXPECT_EQ(got.value().to_vector<double>(),
            (sharded ? part(expected.value(), 1, tp) : expected.value()).to_vector<double>())
      << what;
  backward(expected, {.seed = weights.clone()});
  backward(got, {.seed = sharded ? part(weights, 1, tp) : weights.clone()});
  EXPECT_EQ(own.grad().to_vector<double>(), part(full.grad(), 0, tp).to_vector<double>()) << what;
}

TEST(VocabParallel, LookupMatchesFullTableBitwise) {
  for (const int ranks : {1, 2, 3, 4})
    launch({.ranks = ranks, .threads_per_rank = 1, .timeout_s = 60}, [&](Communicator& tp) {
      const Philox random = Philox::named(8, "sizes");
      for (uint64_t trial = 0; trial < 8; ++trial) {
        const auto vocab = ranks + static_cast<int64_t>(random.below(20, trial));
        check_lookup(tp, 1 + static_cast<int64_t>(random.below(30, trial, 1)), vocab, I);
        check_lookup(tp, ranks * (1 + static_cast<int64_t>(random.below(8, trial, 2))), vocab, S(1));
      }
    });
}

// Errors are those of the unsharded operations, on every rank, so that no rank blocks.
TEST(VocabParallel, RejectsInvalidIdsOnEveryRank) {
  launch({.ranks = 2, .threads_per_rank = 1, .timeout_s = 20}, [](Communicator& tp) {
    const ArenaPtr arena = make_arena();
    const Var rows(Tensor::zeros({tp.rank() + 2, 3}, DType::float32, arena)),
        logits(Tensor::zeros({2, tp.rank() + 2}, DType::float32, arena));
    for (const int32_t bad : {5, -2}) {
      const Tensor ids = Tensor::of<int32_t>(std::vector<int32_t>{4, bad}, {2}, arena);
      const std::string tail = "is outside [0, 5)";
      EXPECT_EQ(error_message([&] { vocab_parallel_embedding(ids, rows, tp, 5); }),
                "[embedding] id " + std::to_string(bad) + " at position 1 " + tail);
      EXPECT_EQ(error_message([&] { vocab_parallel_cross_entropy(logits, ids, 1, tp, 5); }),
                "[cross_entropy] target " + std::to_string(bad) + " of row 1 " + tail);
    }
    const Tensor ids = Tensor::zeros({2}, DType::int32, arena);
    EXPECT_EQ(error_message([&] { vocab_parallel_embedding(ids, rows, tp, 9); }),
              fmt::format("[vocab_parallel_embedding] world axis: the table of rank {} is {}; expected {} of 9 rows",
                          tp.rank(), rows.value().describe(), tp.rank() + 4));
    EXPECT_EQ(error_message([&] { vocab_parallel_cross_entropy(logits, ids, 1, tp, 9); }),
              "[vocab_parallel_cross_entropy] world axis: the logits of rank " + std::to_string(tp.rank()) + " are " +
                  logits.value().describe() + "; expected (N, " + std::to_string(tp.rank() + 4) + ") of 9 columns");
    Embedding small(1, 3);
    EXPECT_EQ(error_message([&] { vocab_wise(small, tp, I); }),
              "[tensor_parallel] world axis: size 1 along dim 0 of a parameter of '' cannot be sharded over 2 ranks");
  });
}

// Ring attention, Ulysses and a sharded vocabulary with very different scores or logits between ranks, compared with
// plain loops in float64.

// q, k and v of some tokens as (1, T, (H + 2 K) D).
std::vector<double> packed(const AttentionShape& s, const std::vector<int64_t>& tokens, const std::vector<double>& q,
                           const std::vector<double>& k, const std::vector<double>& v) {
  std::vector<double> out;
  const auto add = [&](const std::vector<double>& from, int64_t t, int64_t width) {
    out.insert(out.end(), from.begin() + t * width, from.begin() + (t + 1) * width);
  };
  for (const int64_t t : tokens) {
    add(q, t, s.h * s.d);
    if (k.empty()) continue;
    add(k, t, s.k * s.d);
    add(v, t, s.k * s.d);
  }
  return out;
}

enum class Mode : uint8_t { zigzag, contiguous, ulysses };

void expect_matches_reference(const AttentionShape& s, Extreme extreme, Mode mode, DType dtype, Communicator& cp,
                              const ArenaPtr& arena) {
  const AttentionValues x = sample_extreme(s, extreme, 11);
  const PlainAttention expected = reference_attention(s, x);
  const SequencePartition balance = mode == Mode::zigzag ? SequencePartition::zigzag : SequencePartition::contiguous;
  const std::vector<int64_t> mine = context_positions(s.tk, cp.size(), cp.rank(), balance);
  const auto tensor = [&](const std::vector<double>& values) {
    const int64_t tokens = std::ssize(mine);
    return Tensor::of<double>(values, {1, tokens, std::ssize(values) / tokens}, make_arena()).to(dtype).to(arena);
  };
  const Heads heads{s.h, s.k};
  const AttentionOptions options{.causal = s.causal};
  const Var qkv(tensor(packed(s, mine, x.q, x.k, x.v)), true);
  const Var y = mode == Mode::ulysses ? ulysses_attention(qkv, heads, options, cp)
                                      : ring_attention(qkv, heads, options, cp, balance);
  backward(y, {.seed = tensor(packed(s, mine, x.dout, {}, {}))});
  const double bound = dtype == DType::float64 ? 1e-11 : 5e-4;
  const std::string what = fmt::format("rank {} of {}, extreme {}, mode {}", cp.rank(), cp.size(),
                                       static_cast<int>(extreme), static_cast<int>(mode));
  EXPECT_LE(row_difference(host_values(y.value()), packed(s, mine, expected.out, {}, {}), s.d, 0.05), bound) << what;
  EXPECT_LE(
      row_difference(host_values(qkv.grad()), packed(s, mine, expected.dq, expected.dk, expected.dv),
                     heads.packed() * s.d, 0.1, packed(s, mine, expected.dq_terms, expected.dk_terms, expected.dv)),
      2 * bound)
      << what;
}

void expect_matches_loops(int ranks, std::initializer_list<DType> dtypes, Device device) {
  launch({.ranks = ranks, .threads_per_rank = 1, .timeout_s = 60}, [&](Communicator& world) {
    for (const DType dtype : dtypes)
      for (const Mode mode : {Mode::zigzag, Mode::contiguous, Mode::ulysses})
        for (const bool causal : {true, false})
          for (const Extreme extreme : kExtremes) {
            const ArenaPtr arena = device == Device::cpu ? world.make_arena() : make_arena(device);
            const int64_t tokens = 24 * ranks;
            expect_matches_reference({.tq = tokens, .tk = tokens, .h = 2 * ranks, .k = ranks, .d = 4, .causal = causal},
                                     extreme, mode, dtype, world, arena);
          }
  });
}

TEST(ExtremeInputs, ContextParallelMatchesReferenceLoops) {
  for (const int ranks : {1, 2, 3, 4}) expect_matches_loops(ranks, {DType::float64, DType::float32}, Device::cpu);
}

// The largest logit, and the target's, may be on any rank.
void expect_loss(int ranks, DType dtype) {
  constexpr int64_t kRows = 12, kVocab = 25;
  const Philox random = Philox::named(2, "logits");
  std::vector<double> logits, losses, gradient;
  std::vector<int32_t> targets;
  for (int64_t i = 0; i < kRows; ++i) {
    double largest = -INFINITY, sum = 0;
    for (int64_t j = 0; j < kVocab; ++j) {
      const double by = i == 0 ? 0 : 150.0 * static_cast<double>((j * (i % 4) / 6 + i) % 4);  // from rank to rank
      logits.push_back(nearest_bf16(i == 1 ? 7 : by + random.normal(static_cast<uint64_t>(i * kVocab + j))));
      largest = std::max(largest, logits.back());
    }
    targets.push_back(static_cast<int32_t>(i == 2 ? -1 : i * 5 % kVocab));
    const double* const row = logits.data() + i * kVocab;
    for (int64_t j = 0; j < kVocab; ++j) sum += std::exp(row[j] - largest);
    losses.push_back(targets.back() < 0 ? 0 : largest + std::log(sum) - row[targets.back()]);
    for (int64_t j = 0; j < kVocab; ++j)
      gradient.push_back(targets.back() < 0 ? 0 : std::exp(row[j] - largest) / sum - (j == targets.back() ? 1 : 0));
  }
  double total = 0;
  for (const double one : losses) total += one;
  launch({.ranks = ranks, .threads_per_rank = 1, .timeout_s = 60}, [&](Communicator& world) {
    const Range own = chunk_range(kVocab, ranks, world.rank());
    const ArenaPtr arena = world.make_arena();
    const auto columns = [&](const std::vector<double>& from) {
      return Tensor::of<double>(from, {kRows, kVocab}, arena).narrow(1, own.begin, own.size()).contiguous();
    };
    const Var x(columns(logits).to(dtype), true);
    const Loss loss = vocab_parallel_cross_entropy(x, Tensor::of<int32_t>(targets, {kRows}, arena), 1, world, kVocab);
    backward(loss.mean);
    const double bound = dtype == DType::float64 ? 1e-11 : 1e-4;
    EXPECT_NEAR(double{loss.loss_sum}, total, bound * total);
    EXPECT_LE(row_difference(host_values(x.grad()), columns(gradient).to_vector<double>(), own.size(), 1), bound);
  });
}

TEST(ExtremeInputs, VocabParallelMatchesReferenceLoops) {
  for (const int ranks : {1, 2, 3, 4})
    for (const DType dtype : {DType::float64, DType::float32}) expect_loss(ranks, dtype);
}

using ExtremeInputsGpu = test::OnGpu;

TEST_F(ExtremeInputsGpu, ContextParallelMatchesReferenceLoops) {
  expect_matches_loops(2, {DType::float32}, Device::cuda);
}

}  // namespace
}  // namespace tessera
