// The vocabulary cut over ranks: lookup, and a cross-entropy that never sees a whole row of logits.

#include "parallel/comm/launch.h"
#include "parallel/tensor_parallel.h"
#include "tests/support/errors.h"

namespace tessera {
namespace {

Tensor normal(const Shape& shape, uint64_t name, DType dtype, const ArenaPtr& arena) {
  const Tensor t = Tensor::empty(shape, DType::float64, arena);
  const Philox random = Philox::named(name, "vocab");
  for (int64_t i = 0; i < t.numel(); ++i) t.data<double>()[i] = 3 * random.normal(static_cast<uint64_t>(i));
  return t.to(dtype);
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

Tensor part(const Tensor& whole, int dim, const Communicator& tp) {
  const Range own = piece(whole.dim(dim), tp.size(), tp.rank());
  return whole.narrow(dim, own.begin, own.size()).clone();
}

double distance(const Tensor& a, const Tensor& b) {
  const std::vector<double> x = a.to(DType::float64).to_vector<double>(), y = b.to(DType::float64).to_vector<double>();
  EXPECT_EQ(x.size(), y.size());
  double difference = 0, norm = 0;
  for (size_t i = 0; i < x.size(); ++i) {
    difference += (x[i] - y[i]) * (x[i] - y[i]);
    norm += y[i] * y[i];
  }
  return norm > 0 ? std::sqrt(difference / norm) : std::sqrt(difference);
}

void check_loss(Communicator& tp, int64_t rows, int64_t vocab, DType dtype, double bound) {
  const ArenaPtr arena = make_arena();
  const std::string what = std::to_string(rows) + " rows of " + std::to_string(vocab) + " in " +
                           std::string(name_of(dtype)) + " over " + std::to_string(tp.size());
  const Var whole(normal({rows, vocab}, static_cast<uint64_t>(rows), dtype, arena), true);
  const Var own(part(whole.value(), 1, tp), true);
  const Tensor targets = random_ids(rows, vocab, true, arena);
  const Loss expected = cross_entropy(scale(whole, 1), targets, 0.3);
  tp.reset_counts();
  const Loss got = vocab_parallel_cross_entropy(scale(own, 1), targets, 0.3, tp, vocab);
  // The maximum, the sum and the target's logit of each row, and nothing else.
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
  EXPECT_LE(distance(own.grad(), part(whole.grad(), 1, tp)), bound) << what;
}

TEST(VocabParallel, LossAndGradientAreThoseOfWholeRows) {
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

// Logits that overflow without the maximum of all ranks.
TEST(VocabParallel, TheMaximumIsThatOfAllRanks) {
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
      EXPECT_NEAR(logits.grad().to_vector<float>()[j], expected[j], 1e-4);  // the row's logarithm is rounded
  });
}

// No second tensor of their size exists, unless somebody else holds the logits.
TEST(VocabParallel, TheGradientIsWrittenOverTheLogits) {
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
      if (held) {
        EXPECT_EQ(holder.to_vector<float>(), before.to_vector<float>());
      }
    }
  });
}

void check_lookup(Communicator& tp, int64_t n, int64_t vocab, const Placement& between) {
  const ArenaPtr arena = make_arena();
  const std::string what = std::to_string(n) + " ids of " + std::to_string(vocab) + ", " + between.str();
  const Var whole(normal({vocab, 5}, 2, DType::float64, arena), true);
  const Var own(part(whole.value(), 0, tp), true);
  const Tensor ids = random_ids(n, vocab, false, arena).reshape({1, n});
  const Tensor weights = normal({1, n, 5}, 4, DType::float64, arena);
  const Var expected = embedding(ids, whole), got = join(vocab_parallel_embedding(ids, own, tp, vocab), tp, between);
  const bool sharded = !(between == I);
  EXPECT_EQ(got.value().to_vector<double>(),
            (sharded ? part(expected.value(), 1, tp) : expected.value()).to_vector<double>())
      << what;
  backward(expected, {.seed = weights.clone()});
  backward(got, {.seed = sharded ? part(weights, 1, tp) : weights.clone()});
  EXPECT_EQ(own.grad().to_vector<double>(), part(whole.grad(), 0, tp).to_vector<double>()) << what;
}

TEST(VocabParallel, LookupHasTheBitsOfTheWholeTable) {
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

// As the plain operations refuse it, and on every rank, so that nobody waits for another.
TEST(VocabParallel, WhatIsOutsideIsRefusedOnEveryRank) {
  launch({.ranks = 2, .threads_per_rank = 1, .timeout_s = 20}, [](Communicator& tp) {
    const ArenaPtr arena = make_arena();
    const Var rows(Tensor::zeros({tp.rank() + 2, 3}, DType::float32, arena)),
        logits(Tensor::zeros({2, tp.rank() + 2}, DType::float32, arena));
    for (const int32_t bad : {5, -2}) {
      const Tensor ids = Tensor::of<int32_t>(std::vector<int32_t>{4, bad}, {2}, arena);
      const std::string tail = "is outside [0, 5)";
      EXPECT_EQ(error_of([&] { vocab_parallel_embedding(ids, rows, tp, 5); }),
                "[embedding] id " + std::to_string(bad) + " at position 1 " + tail);
      EXPECT_EQ(error_of([&] { vocab_parallel_cross_entropy(logits, ids, 1, tp, 5); }),
                "[cross_entropy] target " + std::to_string(bad) + " of row 1 " + tail);
    }
    const Tensor ids = Tensor::zeros({2}, DType::int32, arena);
    EXPECT_EQ(error_of([&] { vocab_parallel_embedding(ids, rows, tp, 9); }),
              "[vocab_parallel_embedding] world axis: the table of rank " + std::to_string(tp.rank()) + " is " +
                  rows.value().describe() + "; expected " + std::to_string(tp.rank() + 4) + " of 9 rows");
    EXPECT_EQ(error_of([&] { vocab_parallel_cross_entropy(logits, ids, 1, tp, 9); }),
              "[vocab_parallel_cross_entropy] world axis: the logits of rank " + std::to_string(tp.rank()) + " are " +
                  logits.value().describe() + "; expected (N, " + std::to_string(tp.rank() + 4) + ") of 9 columns");
    Embedding small(1, 3);
    EXPECT_EQ(error_of([&] { vocab_wise(small, tp, I); }),
              "[tensor_parallel] world axis: 1 along dim 0 of a parameter of '' cannot be cut over 2 ranks");
  });
}

}  // namespace
}  // namespace tessera
