// Sampling: the distribution and its filters. Generation: the model reads exactly the tokens of the window at their
// positions, also beyond the context.
#include "models/sample.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <map>
#include <memory>
#include <numeric>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "models/decoder.h"
#include "tests/support/gpu.h"
#include "tests/support/one_thread.h"
#include "tests/support/tensors.h"

namespace tessera {
namespace {

// Sets the weights of a materialized model on one rank to their constant initial value plus 0.4 times a normal value.
void sample_weights(Module& model, uint64_t seed = 3) {
  for (const Parameter* p : model.parameters()) {
    const Philox random = Philox::named(seed, p->name);
    Tensor values = p->var.value();
    values.copy_from(test::made(values.shape(), values.dtype(), values.arena(),
                                [&](size_t i) { return p->init.constant + 0.4 * random.normal(i); }));
  }
}

class SamplingTest : public testing::Test {
 protected:
  // Distinct tokens in 4,000 samples.
  static std::string keys(const Tensor& logits, const SampleOptions& o) {
    std::set<int32_t> found;
    for (uint64_t i = 0; i < 4000; ++i) found.insert(sample_token(logits, o, i));
    std::string s;
    for (const int32_t token : found) s += std::to_string(token);
    return s;
  }
  std::string keys(const SampleOptions& o) const { return keys(logits_, o); }
  // Logits whose probabilities have these ratios.
  static Tensor compute_logits(const std::vector<float>& weights) {
    return test::made({std::ssize(weights)}, DType::float32, make_arena(),
                      [&](size_t i) { return std::log(weights[i]); });
  }
  Tensor logits_ = compute_logits({1, 4, 2, 3});
};

TEST_F(SamplingTest, TopKAndTopPTruncateTail) {
  EXPECT_EQ(keys({.top_k = 1}), "1");
  EXPECT_EQ(keys({.top_k = 3}), "123");
  EXPECT_EQ(keys({.top_p = 0.39}), "1");
  EXPECT_EQ(keys({.top_p = 0.69}), "13");
  EXPECT_EQ(keys({.top_p = 0.71}), "123");
  EXPECT_EQ(keys({.top_k = 2, .top_p = 0.99}), "13");
  EXPECT_EQ(keys({.vocab = 3}), "012");  // padding is never sampled
  EXPECT_EQ(keys({.temperature = 0, .vocab = 1}), "0");
  EXPECT_EQ(keys({.temperature = 0}), "1");
}

// As in transformers, filters apply successively, and ties with the k-th token remain.
TEST_F(SamplingTest, FiltersApplyInOrderOfTransformers) {
  EXPECT_EQ(keys(compute_logits({4, 3, 3, 1}), {.top_k = 2}), "012");
  // Top-p 0.55 retains 0.4 and 0.3, and so does min-p; if min-p came first, top-p would retain only the first.
  EXPECT_EQ(keys(compute_logits({4, 3, 2, 1}), {.top_p = 0.55, .min_p = 0.7}), "01");
  EXPECT_EQ(keys(compute_logits({4, 3, 2, 1}), {.top_p = 0.39, .min_p = 0.7}), "0");
  EXPECT_EQ(keys(compute_logits({40, 30, 20, 10}), {.top_k = 2, .top_p = 0.56}), "0");  // the first reaches 4/7
}

// transformers' RepetitionPenaltyLogitsProcessor: the penalty applies once per token.
TEST_F(SamplingTest, RepetitionPenaltyAppliesOncePerToken) {
  const Tensor logits = Tensor::of<float>(std::array{2.0f, 1.9f, -1.0f, -1.2f}, {4}, make_arena());
  const SampleOptions o{.temperature = 0, .repetition_penalty = 1.04};
  EXPECT_EQ(sample_token(logits, o, 0, std::vector<int32_t>{0, 0, 0, 0}), 0) << "2 / 1.04 is above 1.9";
  EXPECT_EQ(sample_token(logits, o, 0, std::vector<int32_t>{0, 1, 0, 2, 0, 0, 1, 3}), 0);
  EXPECT_EQ(sample_token(logits, {.temperature = 0, .repetition_penalty = 1.06}, 0, std::vector<int32_t>{0}), 1);
  const Tensor negative = Tensor::of<float>(std::array{-1.0f, -1.1f}, {2}, make_arena());
  EXPECT_EQ(sample_token(negative, o, 0, std::vector<int32_t>{0, 0, 0}), 0) << "-1.04";
  EXPECT_EQ(sample_token(negative, {.temperature = 0, .repetition_penalty = 1.2}, 0, std::vector<int32_t>{0}), 1);
}

TEST_F(SamplingTest, TokensDependOnlyOnSeedAndIndex) {
  const auto samples = [&](uint64_t seed) {
    std::vector<int32_t> tokens;
    for (uint64_t i = 0; i < 50; ++i) tokens.push_back(sample_token(logits_, {.seed = seed}, i));
    return tokens;
  };
  EXPECT_EQ(samples(1), samples(1));
  EXPECT_NE(samples(1), samples(2));
}

TEST(Sample, GeneratesBeyondContextAndFromLongPrompts) {
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

// The window that generation reads: exactly its tokens at their positions; and sampling of a token from its logits.

constexpr int64_t kVocab = 13;
using Text = std::vector<int32_t>;

ModelConfig to_model_config(Family family, int64_t context) {
  ModelConfig c{.family = family, .layers = 2, .heads = 4, .channels = 16, .context = context, .vocab = kVocab};
  if (family == Family::llama) c.kv_heads = 2;
  return c;
}

std::unique_ptr<LanguageModel> made(const ModelConfig& config, const ArenaPtr& arena) {
  std::unique_ptr<LanguageModel> model = make_model(config);
  model->materialize(1, arena, DType::float64, DType::float64);
  sample_weights(*model);
  return model;
}

Text random_text(int64_t count, uint64_t seed) {
  const Philox random = Philox::named(seed, "window");
  const auto token = [&](size_t i) { return random.below(kVocab, i); };
  return test::made({count}, DType::int32, make_arena(), token).to_vector<int32_t>();
}

Tensor make_ids(std::span<const int32_t> text, const ArenaPtr& arena) {
  return Tensor::of<int32_t>(text, {1, std::ssize(text)}, arena);
}

// Logits (V) of the token after a text, by a full forward pass.
Tensor after(LanguageModel& model, std::span<const int32_t> text, const ArenaPtr& arena) {
  const NoGrad no_grad;
  model.set_step({});
  const Tensor logits = model.logits(model.hidden(make_ids(text, arena))).value();
  return logits.select(0, logits.dim(0) - 1);
}

double apart(const Tensor& a, const Tensor& b) {
  const std::vector<double> x = test::host_values(a), y = test::host_values(b);
  EXPECT_EQ(x.size(), y.size());
  double max_error = 0;
  for (size_t i = 0; i < y.size(); ++i) max_error = std::max(max_error, std::abs(x.at(i) - y[i]));
  return max_error;
}

using Window = test::OneThread;

// If the logits did not depend on a token, the following tests could not detect that it is wrong.
TEST_F(Window, LogitsDependOnEveryTokenAndPosition) {
  const ArenaPtr arena = make_arena();
  for (const Family family : {Family::gpt2, Family::llama}) {
    const auto model = made(to_model_config(family, 8), arena);
    const Text text = random_text(8, 1);
    const Tensor logits = after(*model, text, arena);
    for (size_t i = 0; i < text.size(); ++i) {
      Text other = text;
      other[i] = (other[i] + 1) % static_cast<int32_t>(kVocab);
      EXPECT_GT(apart(after(*model, other, arena), logits), 1e-3) << i;
    }
    EXPECT_GT(apart(after(*model, std::span(text).subspan(1), arena), logits), 1e-3);
    Text swapped = text;
    std::swap(swapped[1], swapped[2]);
    ASSERT_NE(text[1], text[2]);
    EXPECT_GT(apart(after(*model, swapped, arena), logits), 1e-3);
  }
}

// Tries every split of the text into successively decoded chunks.
TEST_F(Window, ChunkedDecodingMatchesForwardPass) {
  const ArenaPtr arena = make_arena();
  for (const Family family : {Family::gpt2, Family::llama}) {
    const auto model = made(to_model_config(family, 9), arena);
    for (uint64_t cuts = 0; cuts < 256; cuts += 5) {
      const Text text = random_text(9, cuts);
      TextCache cache = model->cache();
      for (size_t begin = 0, end = 1; begin < text.size(); begin = end++) {
        while (end < text.size() && (cuts >> (end - 1) & 1) == 0) ++end;
        const auto read = std::span(text).first(end);
        const Tensor found = model->decode(make_ids(read.subspan(begin), arena), cache);
        EXPECT_LE(apart(found, after(*model, read, arena)), 1e-11) << "cuts " << cuts << ", after " << end;
      }
    }
  }
}

// Expects the same tokens as sampling from a forward pass over the window: the prompt's last tokens, one more after
// each sample, and the last half of a full context.
void expect_written(const ArenaPtr& arena, const std::vector<int64_t>& contexts) {
  for (const Family family : {Family::gpt2, Family::llama})
    for (const int64_t context : contexts) {
      const auto model = made(to_model_config(family, context), arena);
      const auto limit = static_cast<size_t>(context);
      for (const int64_t prompt : {int64_t{1}, int64_t{3}, context, context + 1, 2 * context + 3}) {
        Text text = random_text(prompt, static_cast<uint64_t>(context));
        size_t window = std::min(text.size(), limit);
        uint64_t samples = 0;
        const SampleOptions options{.temperature = 1.5, .seed = static_cast<uint64_t>(prompt)};
        sample(*model, text, 3 * context + 5, options, [&](int32_t token) {
          EXPECT_EQ(token, sample_token(after(*model, std::span(text).last(window), arena), options, samples++))
              << "context " << context << ", a prompt of " << prompt << ", token " << samples;
          text.push_back(token);
          if (++window > limit) window = std::max<size_t>(1, limit / 2);
          return true;
        });
        EXPECT_EQ(std::ssize(text), prompt + 3 * context + 5);
      }
    }
}

TEST_F(Window, GenerationReadsOnlyContextWindow) { expect_written(make_arena(), {1, 2, 3, 5, 8, 16}); }

using WindowGpu = test::OnGpu;

TEST_F(WindowGpu, GenerationReadsOnlyContextWindow) {
  if (const std::string why = test::no_float64(); !why.empty()) GTEST_SKIP() << why;
  expect_written(arena, {5});
}

// Token probabilities, by definition.
std::vector<double> probabilities(const std::vector<double>& logits, const SampleOptions& o) {
  const size_t vocab = o.vocab > 0 ? static_cast<size_t>(o.vocab) : logits.size();
  std::vector<double> p(logits.size(), 0.0);
  for (size_t i = 0; i < vocab; ++i) p[i] = std::exp(logits[i] / o.temperature);
  const auto filter = [&](const auto& wanted) {  // the likeliest remain while wanted(their number, their sum)
    std::vector<size_t> order(p.size());
    std::iota(order.begin(), order.end(), 0);
    std::ranges::stable_sort(order, [&](size_t a, size_t b) { return p[a] > p[b]; });
    const double total = std::accumulate(p.begin(), p.end(), 0.0);
    double sum = 0;
    for (size_t n = 0; n < order.size(); ++n) {
      const bool selected = n == 0 || wanted(n, sum / total);
      sum += p[order[n]];
      if (!selected) p[order[n]] = 0;
    }
  };
  if (o.top_k > 0) filter([&](size_t n, double) { return n < static_cast<size_t>(o.top_k); });
  if (o.top_p < 1) filter([&](size_t, double sum) { return sum < o.top_p; });
  const double max_error = *std::ranges::max_element(p);
  for (double& x : p) x = x < o.min_p * max_error ? 0 : x;
  const double total = std::accumulate(p.begin(), p.end(), 0.0);
  for (double& x : p) x /= total;
  return p;
}

TEST_F(Window, SamplesFollowSoftmaxOfRemainingLogits) {
  constexpr int kSamples = 20000;
  const std::vector<double> logits = {0.3, -1.2, 2.1, 0.9, -0.4, 1.6, -2.5, 0.0, 1.1};
  const Tensor tensor = Tensor::of<double>(logits, {9}, make_arena());
  uint64_t seed = 0;
  for (const double temperature : {0.4, 1.0, 4.0})
    for (const int64_t top_k : {0, 1, 4, 20})
      for (const auto& [top_p, min_p] : {std::pair{0.05, 0.0}, {0.8, 0.0}, {1.0, 0.0}, {0.8, 0.3}})
        for (const int64_t vocab : {0, 5}) {
          const SampleOptions o{.temperature = temperature,
                                .top_k = top_k,
                                .top_p = top_p,
                                .min_p = min_p,
                                .seed = ++seed,
                                .vocab = vocab};
          const std::vector<double> expected = probabilities(logits, o);
          std::vector<int> found(logits.size());
          for (uint64_t i = 0; i < kSamples; ++i) ++found.at(static_cast<size_t>(sample_token(tensor, o, i)));
          for (size_t t = 0; t < logits.size(); ++t) {
            const double p = expected[t];
            EXPECT_NEAR(found[t], kSamples * p, 4.5 * std::sqrt(kSamples * p * (1 - p)) + 1e-6)
                << "token " << t << ": temperature " << temperature << ", top-k " << top_k << ", top-p " << top_p
                << ", vocabulary " << vocab;
          }
        }
}

}  // namespace
}  // namespace tessera
