// How rows hold examples, and the order that they come in.
#include <gtest/gtest.h>

#include <numeric>

#include "data/examples.h"
#include "tensor/error.h"

namespace tessera {
namespace {

EncodedExample example_of(int32_t first, int64_t prompt, int64_t response) {
  EncodedExample out{std::vector<int32_t>(static_cast<size_t>(prompt + response)),
                     std::vector<bool>(static_cast<size_t>(prompt), false)};
  std::iota(out.tokens.begin(), out.tokens.end(), first);
  out.trained.resize(out.tokens.size(), true);
  return out;
}

TEST(ExampleRows, TrainTheResponseAndNeverThePadding) {
  const ExampleRows rows({example_of(10, 2, 2), example_of(20, 0, 2)}, 5, false);
  std::vector<int32_t> in(10), out(10);
  rows.load(0, 2, in.data(), out.data());
  EXPECT_EQ(in, (std::vector<int32_t>{10, 11, 12, 0, 0, 20, 0, 0, 0, 0}));
  EXPECT_EQ(out, (std::vector<int32_t>{-1, 12, 13, -1, -1, 21, -1, -1, -1, -1}));
  EXPECT_EQ(rows.targets(), 3);
  EXPECT_EQ(rows.targets_of(0), 2);
  EXPECT_EQ(rows.prompt(), (std::vector<int32_t>{10, 11}));
  EXPECT_EQ(rows.target_tokens(), (std::vector<int32_t>{12, 13, 21}));
  EXPECT_THROW(rows.load(1, 2, in.data(), out.data()), Error);
  EXPECT_THROW(ExampleRows({example_of(0, 2, 5)}, 5, false), Error);  // too long
  EXPECT_THROW(ExampleRows({example_of(0, 3, 0)}, 5, false), Error);  // nothing to learn
}

// Every target once, with the same tokens before it as alone, and its document's beginning.
TEST(ExampleRows, PackedHoldEachExampleOnceAndApart) {
  std::vector<EncodedExample> examples;
  const Philox random = Philox::named(1, "packing");
  for (uint64_t e = 0; e < 50; ++e)
    examples.push_back(example_of(static_cast<int32_t>(100 * e), static_cast<int64_t>(random.below(5, e)),
                                  2 + static_cast<int64_t>(random.below(7, e, 1))));
  const ExampleRows rows(examples, 16, true);
  EXPECT_LT(rows.count(), 25);
  int64_t targets = 0, positions = 0;
  std::set<int32_t> seen;
  for (int64_t r = 0; r < rows.count(); ++r) {
    std::vector<int32_t> in(16), out(16), starts(16);
    rows.load(r, 1, in.data(), out.data());
    rows.starts(r, 1, starts.data());
    int64_t own = 0;
    for (size_t t = 0; t < 16; ++t) {
      if (out[t] < 0) continue;
      ++own;
      EXPECT_TRUE(seen.insert(out[t]).second);
      const auto& example = examples[static_cast<size_t>(out[t] / 100)];
      const auto start = static_cast<size_t>(starts[t]);
      EXPECT_EQ(in[start], example.tokens[0]);
      EXPECT_EQ(static_cast<size_t>(out[t] % 100), t - start + 1);
      EXPECT_TRUE(example.trained[t - start + 1]);
    }
    EXPECT_EQ(own, rows.targets_of(r));
    targets += own;
  }
  for (const EncodedExample& e : examples) positions += targets_of(e);
  EXPECT_EQ(targets, positions);
  EXPECT_EQ(rows.targets(), positions);
  EXPECT_NE(rows.checksum(), ExampleRows(examples, 16, false).checksum());
}
TEST(Permutation, HoldsEveryPlaceOnceInEachRound) {
  const Philox random = Philox::named(3, "shuffle");
  for (const uint64_t count : {1U, 2U, 3U, 7U, 64U, 65U, 1000U}) {
    std::set<std::vector<uint64_t>> orders;
    for (uint64_t round = 0; round < 20; ++round) {
      std::vector<uint64_t> order, sorted(count);
      for (uint64_t place = 0; place < count; ++place) order.push_back(permuted(random, round, count, place));
      orders.insert(order);
      std::sort(order.begin(), order.end());
      std::iota(sorted.begin(), sorted.end(), 0);
      EXPECT_EQ(order, sorted);
    }
    EXPECT_GE(orders.size(), count == 1 ? 1 : count == 2 ? 2 : count == 3 ? 4 : 19) << count;
  }
}

// The first place goes to any of five alike: chi-square with four degrees of freedom below its 99.9% quantile.
TEST(Permutation, HasNoFavourites) {
  const Philox random = Philox::named(4, "shuffle");
  std::vector<double> firsts(5, 0.0);
  constexpr uint64_t kTrials = 5000;
  for (uint64_t round = 0; round < kTrials; ++round) ++firsts[permuted(random, round, 5, 0)];
  double chi = 0;
  for (const double found : firsts) chi += (found - kTrials / 5.0) * (found - kTrials / 5.0) / (kTrials / 5.0);
  EXPECT_LT(chi, 18.5);
}

}  // namespace
}  // namespace tessera
