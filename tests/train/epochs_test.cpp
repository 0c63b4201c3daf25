// Training in epochs: every window once in each, the same sequences under every layout, and from any step on.
#include <gtest/gtest.h>

#include "data/mixture.h"
#include "data/tokenizer/described.h"
#include "train/checkpoint/state.h"

namespace tessera {
namespace {

constexpr int64_t kContext = 8, kBatch = 12;

class EpochsTest : public testing::Test {
 protected:
  // Windows that begin with different numbers: the token at i is i % 251, and files begin 100 apart.
  static TokenFile numbered(int32_t first, int64_t count) {
    std::vector<int32_t> tokens;
    for (int64_t i = 0; i < count; ++i) tokens.push_back(static_cast<int32_t>((first + i) % 251));
    return TokenFile::of_tokens(tokens, 256, "numbers");
  }
  static Dataset dataset(std::vector<TokenFile> train) {
    Dataset d;
    d.train = std::move(train);
    d.val = numbered(0, 20);
    d.val_bytes = 20;
    d.tokenizer = std::make_shared<ByteTokenizer>();
    return d;
  }
  static Dataset shards() { return dataset({numbered(0, 81), numbered(100, 50), numbered(200, 30)}); }
  static Dataset mixture() {
    std::vector<Dataset> all;
    all.push_back(shards());
    all.push_back(dataset({numbered(7, 40)}));
    all.push_back(dataset({numbered(3, 100)}));
    return mixed({{"a", 5}, {"b", 2}, {"c", 3}}, std::move(all));
  }
  // The first tokens of sequences [first, first + count) of the endless list.
  static std::vector<int32_t> firsts(const Sequences& sequences, int64_t batch, int64_t first, int64_t count) {
    std::vector<int32_t> out, inputs(kContext), targets(kContext);
    for (int64_t i = first; i < first + count; ++i) {
      sequences.load(i / batch, i % batch, 1, inputs.data(), targets.data());
      out.push_back(inputs[0]);
      for (int64_t t = 0; t + 1 < kContext; ++t)
        EXPECT_EQ(inputs[static_cast<size_t>(t) + 1], targets[static_cast<size_t>(t)]);
    }
    return out;
  }

  using File = std::map<std::string, std::vector<std::byte>>;
  static File file_of(Trainer& trainer) {
    File out;
    for (const auto& tensors : {whole_values(trainer), whole_state(trainer)})
      for (const NamedTensor& t : tensors)
        out[t.name] = {t.tensor.contiguous().raw(), t.tensor.contiguous().raw() + t.tensor.nbytes()};
    return out;
  }
  // The values and the state after so many steps of 12 sequences.
  static File trained(const Dataset& data, Plan plan, int64_t steps) {
    plan.threads_per_rank = 1;
    const Job job{.model = {.layers = 2, .heads = 2, .channels = 16, .context = kContext, .vocab = 256, .dropout = 0.1},
                  .optim = {.lr = 0.02, .warmup = 1, .steps = steps, .batch = kBatch},
                  .plan = plan};
    check(job);
    File out;
    launch(launch_options(plan), [&](Communicator& world) {
      Trainer trainer(job, sequences_of(data, kContext, kBatch, 1), world);
      for (int64_t i = 0; i < steps; ++i) trainer.step();
      File mine = file_of(trainer);
      if (world.rank() == 0) out = std::move(mine);
    });
    return out;
  }
};

TEST_F(EpochsTest, EveryWindowOnceInEach) {
  const Dataset data = shards();
  constexpr int64_t kWindows = 10 + 6 + 3;
  const Sequences sequences = sequences_of(data, kContext, 5, 3);
  std::set<std::vector<int32_t>> orders;
  std::multiset<int32_t> all;
  for (const TokenFile& f : data.train)
    for (int64_t w = 0; (w + 1) * kContext < f.size(); ++w) all.insert(f[w * kContext]);
  ASSERT_EQ(std::ssize(all), kWindows);
  for (int64_t epoch = 0; epoch < 8; ++epoch) {
    const std::vector<int32_t> seen = firsts(sequences, 5, epoch * kWindows, kWindows);
    EXPECT_EQ(std::multiset<int32_t>(seen.begin(), seen.end()), all) << epoch;
    orders.insert(seen);
  }
  EXPECT_EQ(orders.size(), 8U);  // each has an order of its own
  EXPECT_NE(firsts(sequences_of(data, kContext, 5, 4), 5, 0, kWindows), firsts(sequences, 5, 0, kWindows));
  // the batch cuts the list and does not change it
  EXPECT_EQ(firsts(sequences_of(data, kContext, 7, 3), 7, 0, 40), firsts(sequences, 5, 0, 40));
}

TEST_F(EpochsTest, OneFileOnlyWhereItIsAskedFor) {
  const Dataset data = dataset({numbered(0, 81)});
  const std::vector<int32_t> seen = firsts(sequences_of(data, kContext, 5, 3, true), 5, 0, 10);
  EXPECT_EQ(std::set<int32_t>(seen.begin(), seen.end()).size(), 10U);
  for (const int32_t first : seen) EXPECT_EQ(first % kContext, 0);
  EXPECT_NE(firsts(sequences_of(data, kContext, 5, 3), 5, 0, 10), seen);
}

// A dataset in a mixture has its epochs, whatever comes between.
TEST_F(EpochsTest, OfAMixtureEachHasItsOwn) {
  const Dataset data = mixture();
  const Sequences sequences = sequences_of(data, kContext, kBatch, 3);
  const std::vector<int32_t> seen = firsts(sequences, kBatch, 0, 100);  // 50, 20 and 30 of them
  std::multiset<int32_t> expected;                                      // the windows of whole epochs
  int64_t begun = 0;
  for (size_t k = 0; k < 3; ++k) {
    std::vector<int32_t> windows;
    for (const TokenFile& f : data.parts[k].dataset->train)
      for (int64_t w = 0; (w + 1) * kContext < f.size(); ++w) windows.push_back(f[w * kContext]);
    const int64_t count = std::array{50, 20, 30}.at(k);
    for (int64_t epoch = 0; epoch < count / std::ssize(windows); ++epoch)
      expected.insert(windows.begin(), windows.end());
    begun += count % std::ssize(windows);
  }
  std::multiset<int32_t> left(seen.begin(), seen.end());
  for (const int32_t first : expected) {
    ASSERT_TRUE(left.contains(first)) << first;
    left.erase(left.find(first));
  }
  EXPECT_EQ(std::ssize(left), begun);
}

TEST_F(EpochsTest, EveryLayoutReadsTheSame) {
  const Dataset cut = shards(), mix = mixture();
  for (const Dataset* data : {&cut, &mix}) {
    const File one = trained(*data, {.microbatches = 4}, 4);
    EXPECT_TRUE(trained(*data, {.dp = 4}, 4) == one);
    EXPECT_TRUE(trained(*data, {.dp = 4, .zero = ZeroStage::three}, 4) == one);
    const File in_turn = trained(*data, {.tie_copies = true, .microbatches = 2}, 4);
    EXPECT_TRUE(trained(*data, {.pp = 2, .microbatches = 2}, 4) == in_turn);
    EXPECT_FALSE(trained(*data, {.microbatches = 4}, 5) == one);
  }
}

}  // namespace
}  // namespace tessera
