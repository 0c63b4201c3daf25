// Drawing tokens: the distribution, its cuts, and writing past the end of the context.
#include "models/sample.h"

#include <gtest/gtest.h>

#include <set>

#include "models/decoder.h"

namespace tessera {
namespace {

class DrawTest : public testing::Test {
 protected:
  // How often each token comes in 4,000 draws.
  std::map<int32_t, int> counts(const SampleOptions& o) const {
    std::map<int32_t, int> n;
    for (uint64_t i = 0; i < 4000; ++i) ++n[draw_token(logits_, o, i)];
    return n;
  }
  ArenaPtr arena_ = make_arena();
  // Probabilities 0.1, 0.4, 0.2, 0.3.
  Tensor logits_ =
      Tensor::of<float>(std::array{std::log(1.0f), std::log(4.0f), std::log(2.0f), std::log(3.0f)}, {4}, arena_);
};

TEST_F(DrawTest, FollowsTheProbabilities) {
  const auto n = counts({.seed = 1});
  EXPECT_NEAR(n.at(0), 400, 80);
  EXPECT_NEAR(n.at(1), 1600, 130);
  EXPECT_NEAR(n.at(2), 800, 110);
  EXPECT_NEAR(n.at(3), 1200, 120);
}

TEST_F(DrawTest, TemperatureSharpensAndFlattens) {
  EXPECT_EQ(counts({.temperature = 0}), (std::map<int32_t, int>{{1, 4000}}));
  EXPECT_GT(counts({.temperature = 0.2}).at(1), 3000);  // 4^5 : 3^5 : 2^5 : 1
  EXPECT_NEAR(counts({.temperature = 100}).at(0), 1000, 130);
}

TEST_F(DrawTest, TopKAndTopPCutTheTail) {
  const auto keys = [&](const SampleOptions& o) {
    std::string s;
    for (const auto& [token, n] : counts(o)) s += std::to_string(token);
    return s;
  };
  EXPECT_EQ(keys({.top_k = 1}), "1");
  EXPECT_EQ(keys({.top_k = 3}), "123");
  EXPECT_EQ(keys({.top_p = 0.39}), "1");
  EXPECT_EQ(keys({.top_p = 0.69}), "13");
  EXPECT_EQ(keys({.top_p = 0.71}), "123");
  EXPECT_EQ(keys({.top_k = 2, .top_p = 0.99}), "13");
  EXPECT_EQ(keys({.vocab = 3}), "012");  // padding is never drawn
  EXPECT_EQ(keys({.temperature = 0, .vocab = 1}), "0");
}

// As transformers' filters do: one after another on what is left, and ties with the k-th stay.
TEST_F(DrawTest, FiltersComeInTheirOrder) {
  const auto keys = [&](const std::vector<float>& weights, const SampleOptions& o) {
    std::vector<float> logits;
    for (const float w : weights) logits.push_back(std::log(w));
    const Tensor tensor = Tensor::of<float>(logits, {std::ssize(logits)}, arena_);
    std::set<int32_t> found;
    for (uint64_t i = 0; i < 4000; ++i) found.insert(draw_token(tensor, o, i));
    std::string s;
    for (const int32_t token : found) s += std::to_string(token);
    return s;
  };
  EXPECT_EQ(keys({4, 3, 3, 1}, {.top_k = 2}), "012");
  // Top-p 0.75 keeps three of 0.4, 0.3, 0.2 and 0.1, and min-p then two; min-p first would leave one of two for top-p.
  EXPECT_EQ(keys({4, 3, 2, 1}, {.top_p = 0.55, .min_p = 0.7}), "01");
  EXPECT_EQ(keys({4, 3, 2, 1}, {.top_p = 0.39, .min_p = 0.7}), "0");
  EXPECT_EQ(keys({40, 30, 20, 10}, {.top_k = 2, .top_p = 0.56}), "0");  // 4/7 is reached by the first
}

// transformers' RepetitionPenaltyLogitsProcessor: a token pays once, however often it was read.
TEST_F(DrawTest, APenaltyIsPaidOnceAToken) {
  const Tensor logits = Tensor::of<float>(std::array{2.0f, 1.9f, -1.0f, -1.2f}, {4}, arena_);
  const SampleOptions o{.temperature = 0, .repetition_penalty = 1.04};
  EXPECT_EQ(draw_token(logits, o, 0, std::vector<int32_t>{0, 0, 0, 0}), 0) << "2 / 1.04 is above 1.9";
  EXPECT_EQ(draw_token(logits, o, 0, std::vector<int32_t>{0, 1, 0, 2, 0, 0, 1, 3}), 0);
  EXPECT_EQ(draw_token(logits, {.temperature = 0, .repetition_penalty = 1.06}, 0, std::vector<int32_t>{0}), 1);
  const Tensor negative = Tensor::of<float>(std::array{-1.0f, -1.1f}, {2}, arena_);
  EXPECT_EQ(draw_token(negative, o, 0, std::vector<int32_t>{0, 0, 0}), 0) << "-1.04";
  EXPECT_EQ(draw_token(negative, {.temperature = 0, .repetition_penalty = 1.2}, 0, std::vector<int32_t>{0}), 1);
}

TEST_F(DrawTest, IsAFunctionOfSeedAndIndex) {
  std::vector<int32_t> a, b, c;
  for (uint64_t i = 0; i < 50; ++i) {
    a.push_back(draw_token(logits_, {.seed = 1}, i));
    b.push_back(draw_token(logits_, {.seed = 1}, i));
    c.push_back(draw_token(logits_, {.seed = 2}, i));
  }
  EXPECT_EQ(a, b);
  EXPECT_NE(a, c);
}

TEST(Sample, WritesPastTheContextAndTakesLongPrompts) {
  const ArenaPtr arena = make_arena();
  Decoder model({.layers = 2, .heads = 2, .channels = 16, .context = 8, .vocab = 11});
  model.materialize(5, arena, DType::float64, DType::float64);
  const auto write = [&](const std::vector<int32_t>& prompt, int64_t count) {
    std::vector<int32_t> out;
    sample(model, prompt, count, {.seed = 4}, [&](int32_t t) {
      out.push_back(t);
      return true;
    });
    return out;
  };
  const std::vector<int32_t> text = write({1, 2, 3}, 40);
  EXPECT_EQ(text.size(), 40U);
  for (const int32_t t : text) EXPECT_LT(t, 11);
  // Only the last eight tokens of a longer prompt are read.
  std::vector<int32_t> prompt(30, 7);
  for (int32_t i = 0; i < 8; ++i) prompt.push_back(i);
  EXPECT_EQ(write(prompt, 5), write({0, 1, 2, 3, 4, 5, 6, 7}, 5));
  EXPECT_THROW(write({}, 5), Error);
  int calls = 0;
  sample(model, {1}, 20, {}, [&](int32_t) { return ++calls < 3; });
  EXPECT_EQ(calls, 3);
}

// The cache's prediction at each place is that of a plain forward pass over the same window.
TEST(Sample, RestartsReadTheLastHalfOfTheContext) {
  const ArenaPtr arena = make_arena();
  Decoder model({.layers = 1, .heads = 1, .channels = 16, .context = 8, .vocab = 11});
  model.materialize(5, arena, DType::float64, DType::float64);
  std::vector<int32_t> text{3};
  sample(model, text, 30, {.temperature = 0}, [&](int32_t t) {
    // Up to eight tokens; when they are full the last four, then five to eight, and again.
    const size_t n = text.size(), length = n <= 8 ? n : 4 + (n - 9) % 5;
    const std::vector<int32_t> window(text.end() - static_cast<std::ptrdiff_t>(length), text.end());
    const NoGrad no_grad;
    const Tensor ids = Tensor::of<int32_t>(window, {1, static_cast<int64_t>(window.size())}, arena);
    const Tensor logits = model.logits(model.hidden(ids)).value();
    EXPECT_EQ(t, draw_token(logits.select(0, logits.dim(0) - 1), {.temperature = 0}, 0)) << "after " << n << " tokens";
    text.push_back(t);
    return true;
  });
  EXPECT_EQ(text.size(), 31U);
}

}  // namespace
}  // namespace tessera
