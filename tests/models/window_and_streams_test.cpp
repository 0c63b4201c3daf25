// Single-rank details: sliding window width in forward passes and KV caches; rows of adapters on fused projections;
// random streams of texts generated together.

#include <array>
#include <cstdint>
#include <memory>
#include <set>
#include <vector>

#include "models/adapters/adapters.h"
#include "models/decoder.h"
#include "models/sample.h"
#include "tests/support/tensors.h"

namespace tessera {
namespace {

constexpr int64_t kVocab = 13, kContext = 12, kWindow = 4;

class SlidingWindow : public testing::TestWithParam<int64_t> {
 protected:
  std::unique_ptr<LanguageModel> make(int64_t layers) {
    const ModelConfig config{.family = Family::llama,
                             .layers = layers,
                             .heads = 2,
                             .channels = 8,
                             .context = kContext,
                             .vocab = kVocab,
                             .kv_heads = GetParam(),
                             .window = kWindow};
    std::unique_ptr<LanguageModel> model = make_model(config);
    model->materialize(1, arena_, DType::float64, DType::float64);
    for (const Parameter* p : model->parameters()) {
      const Philox random = Philox::named(3, p->name);
      Tensor values = p->var.value();
      values.copy_from(test::made(values.shape(), values.dtype(), arena_,
                                  [&](size_t i) { return p->init.constant + 0.4 * random.normal(i); }));
    }
    return model;
  }
  Tensor ids(int32_t changed_at = -1) {
    Tensor out = Tensor::zeros({1, kContext}, DType::int32, arena_);
    for (int32_t i = 0; i < kContext; ++i) out.data<int32_t>()[i] = (i * 5 + (i == changed_at ? 1 : 0)) % 13;
    return out;
  }
  ArenaPtr arena_ = make_arena();
};

TEST_P(SlidingWindow, MasksEveryTokenBeforeTheLastFour) {
  const std::unique_ptr<LanguageModel> model = make(1);
  const NoGrad no_grad;
  const Tensor plain = model->logits(model->hidden(ids())).value().reshape({kContext, kVocab});
  for (int32_t p = 0; p < kContext; ++p) {
    const Tensor changed = model->logits(model->hidden(ids(p))).value().reshape({kContext, kVocab});
    for (int64_t t = 0; t < kContext; ++t)
      EXPECT_EQ(test::host_values(plain.select(0, t)) != test::host_values(changed.select(0, t)),
                t >= p && t < p + kWindow)
          << "token " << t << " after a change of token " << p;
  }
}

TEST_P(SlidingWindow, DecodingWithCacheMatchesForwardPass) {
  const std::unique_ptr<LanguageModel> model = make(2);
  const NoGrad no_grad;
  const Tensor all = model->logits(model->hidden(ids())).value().reshape({kContext, kVocab});
  TextCache cache = model->cache();
  const std::array texts{&cache};
  int64_t at = 0;
  for (const int64_t length : {5, 1, 1, 3, 1, 1}) {
    const Tensor next = model->decode(ids().narrow(1, at, length).contiguous(), texts);
    at += length;
    const std::vector<double> found = test::host_values(next), expected = test::host_values(all.select(0, at - 1));
    for (size_t i = 0; i < expected.size(); ++i) ASSERT_NEAR(found[i], expected[i], 1e-12) << "token " << at - 1;
  }
}

INSTANTIATE_TEST_SUITE_P(KvHeads, SlidingWindow, testing::Values(1, 2));

TEST(Lora, FusedProjectionRowsMatchTheirComponents) {
  const ModelConfig grouped{
      .family = Family::llama, .layers = 1, .heads = 4, .channels = 16, .vocab = 9, .kv_heads = 2};
  EXPECT_EQ(fused_rows(grouped, 3, 32), (std::vector<int64_t>{16, 8, 8}));
  EXPECT_EQ(fused_rows(grouped, 2, 64), (std::vector<int64_t>{32, 32}));
}

// Equal prompts and logits: only the text's number distinguishes its random numbers.
TEST(Sample, BatchedTextsUseIndependentRandomStreams) {
  Decoder model({.layers = 1, .heads = 1, .channels = 8, .context = 64, .vocab = kVocab});
  const Tensor uniform = Tensor::zeros({kVocab}, DType::float32, make_arena());
  std::set<std::vector<int32_t>> texts;
  constexpr uint64_t kTexts = 6;
  int64_t equal = 0;
  std::vector<std::vector<int32_t>> all;
  for (uint64_t number = 0; number < kTexts; ++number) {
    DecodingState text(model, {1, 2}, 50, number);
    std::vector<int32_t> written;
    for (int i = 0; i < 50; ++i) {
      text.unread();
      written.push_back(text.grow(uniform, {.seed = 5, .vocab = kVocab}));
    }
    for (const std::vector<int32_t>& other : all)
      for (size_t i = 0; i < written.size(); ++i) equal += written[i] == other[i] ? 1 : 0;
    all.push_back(written);
    texts.insert(written);
  }
  EXPECT_EQ(texts.size(), kTexts);
  // 15 pairs of 50 tokens, each equal by chance with probability 1/13: 58 expected, standard deviation 7.
  EXPECT_LT(equal, 58 + 6 * 7);
}

}  // namespace
}  // namespace tessera
