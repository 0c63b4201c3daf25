// The default operations of LanguageModel, on a model that defines only its interface; and packed documents, which are
// computed independently.

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <iterator>
#include <memory>
#include <string>
#include <vector>

#include "models/decoder.h"
#include "models/layout.h"
#include "parallel/comm/fake_transport.h"
#include "tests/support/errors.h"
#include "tests/support/tensors.h"

namespace tessera {
namespace {

class Bare : public DecoderLayer {
 public:
  explicit Bare(const ModelConfig& c)
      : mix(child<Linear>("mix", c.channels, c.channels, Linear::Options{})),
        norm(child<RMSNorm>("norm", c.channels)) {}
  Var forward(const Var& x) override { return add(x, mix(norm(x))); }
  Linear& mix;
  RMSNorm& norm;
};

class BareModel : public LanguageModel {
 public:
  explicit BareModel(const ModelConfig& c) : LanguageModel(c), table(child<Embedding>("table", c.vocab, c.channels)) {
    for (int64_t i = 0; i < c.layers; ++i) layers.push_back(&child<Bare>("layer" + std::to_string(i), c));
    head = &child<Embedding>("head", c.vocab, c.channels);
  }
  Var embed(const Tensor& ids) override { return table.lookup(ids); }
  DecoderLayer& layer(int64_t i) override { return *layers[static_cast<size_t>(i)]; }
  Var logits(const Var& hidden) override { return head->logits(hidden); }
  Embedding& table;
  std::vector<Bare*> layers;
  Embedding* head;
};

const ModelConfig kConfig{.layers = 3, .heads = 1, .channels = 8, .context = 4, .vocab = 11};

TEST(LanguageModel, UnitsFollowDeclarationOrder) {
  BareModel model(kConfig);
  EXPECT_EQ(model.layers_of_units(), (std::vector<int64_t>{-1, 0, 1, 2, 3}));
  model.layers[0]->set_local(false);
  model.table.set_local(false);
  EXPECT_EQ(model.layers_of_units(), (std::vector<int64_t>{1, 2, 3}));
}

TEST(LanguageModel, FlopsMatchManualCount) {
  BareModel model(kConfig);
  EXPECT_EQ(model.layer_flops(0), 2 * 8 * 8 + 2 * 4 * 8);
  EXPECT_EQ(model.head_flops(), 2 * 8 * 11);
  EXPECT_EQ(model.training_flops(), 6 * (3 * (8 * 8 + 8 + 8) + 8 * 11) + 12 * 3 * 8 * 4);
  Decoder gpt({.layers = 3, .heads = 2, .channels = 8, .context = 4, .vocab = 11});
  EXPECT_EQ(gpt.layer_flops(2), 24 * 8 * 8 + 2 * 4 * 8);
  EXPECT_EQ(gpt.training_flops(), 6.0 * static_cast<double>(gpt.parameter_count() - 4 * 8) + 12 * 3 * 8 * 4);
}

// A query attends to i + 1 keys, or the last `window`: for 4 tokens 1 + 2 + 3 + 4, with windows of 2 about 1 + 2 + 2 +
// 2.
TEST(LanguageModel, FlopsOfSlidingWindowsMatchManualCount) {
  ModelConfig config{.family = Family::llama, .layers = 3, .heads = 2, .channels = 8, .context = 64, .vocab = 11};
  const double all = make_model(config)->training_flops();
  for (const int64_t window : {64, 100}) {
    config.window = window;
    EXPECT_EQ(make_model(config)->training_flops(), all);
  }
  config.window = 16;
  EXPECT_EQ(all - make_model(config)->training_flops(), 12 * 3 * 8 * (64 - 16 * (2 - 16.0 / 64)));
}

// Published models: 6 per parameter of a matmul (GPT-2 124M has 124,439,808, of which 786,432 are positions; Llama's
// token table is only a lookup), and 12 L C T.
TEST(LanguageModel, FlopsOfPublishedModelsMatchManualCount) {
  const auto flops = [](const char* name, int64_t vocab) {
    ModelConfig config = preset(name).value();
    config.vocab = vocab;
    return make_model(config)->training_flops();
  };
  EXPECT_EQ(flops("gpt2", 50257), 6.0 * 123'653'376 + 113'246'208);
  EXPECT_EQ(flops("llama2-7b", 32000), 6.0 * (6'738'415'616 - 131'072'000) + 6'442'450'944);
  EXPECT_EQ(flops("llama3-8b", 128256), 6.0 * (8'030'261'248 - 525'336'576) + 12'884'901'888);
}

// The default loss is computed from the logits.
TEST(LanguageModel, DefaultLossMatchesCrossEntropyOfLogits) {
  const ArenaPtr arena = make_arena();
  BareModel model(kConfig);
  model.materialize(1, arena, DType::float32, DType::float32);
  const Tensor ids = Tensor::range(4, arena).reshape({1, 4});
  const Loss loss = model.loss(ids, ids, 0.25);
  const Loss expected = cross_entropy(model.logits(model.hidden(ids)), ids.reshape({4}), 0.25);
  EXPECT_EQ(loss.mean.value().item<double>(), expected.mean.value().item<double>());
  backward(loss.mean);
  EXPECT_TRUE(model.head->weight.grad().defined());
}

TEST(LanguageModel, RejectsUndeclaredFeatures) {
  BareModel model(kConfig);
  Communicator two(std::make_unique<FakeTransport>(0, 2), "tp"), one(std::make_unique<FakeTransport>(0, 1), "cp");
  EXPECT_NO_THROW(model.place({.tp = &one, .cp = &one}));
  EXPECT_EQ(error_message([&] { model.place({.tp = &two, .cp = &one}); }),
            "`tp`: this model does not support this axis; expected size 1, got 2");
  const ArenaPtr arena = make_arena();
  model.materialize(1, arena, DType::float32, DType::float32);
  TextCache cache = model.cache();
  EXPECT_THROW(model.decode(Tensor::range(2, arena).reshape({1, 2}), cache), Error);
}

// Packed documents are computed independently.

constexpr int32_t kEnd = 3;

TEST(Documents, BeginAfterEosToken) {
  const ArenaPtr arena = make_arena();
  const std::vector<int32_t> ids = {7, 5, 3, 5, 6, 8, 3, 3, 4, 3, 7, 7, 7, 7, 7, 7, 7, 3};
  const Documents d = find_documents(Tensor::of<int32_t>(ids, {2, 9}, arena), kEnd);
  EXPECT_EQ(d.starts.to_vector<int32_t>(),
            (std::vector<int32_t>{0, 0, 0, 3, 3, 3, 3, 7, 8, 0, 1, 1, 1, 1, 1, 1, 1, 1}));
  EXPECT_EQ(d.positions.to_vector<int32_t>(),
            (std::vector<int32_t>{0, 1, 2, 0, 1, 2, 3, 0, 0, 0, 0, 1, 2, 3, 4, 5, 6, 7}));
  EXPECT_THROW(find_documents(Tensor::range(4, arena), kEnd), Error);
}

ModelConfig to_model_config(Family family, Recompute recompute) {
  ModelConfig c{
      .family = family, .layers = 2, .heads = 2, .channels = 16, .context = 80, .vocab = 12, .recompute = recompute};
  if (family == Family::llama) c.kv_heads = 1;
  return c;
}

// Accumulates logits and gradients of tokens (B, T), whose losses are summed.
struct Passes {
  explicit Passes(const ModelConfig& config) : model(make_model(config)) {
    model->materialize(5, make_arena(), DType::float64, DType::float64);
  }
  void pass(const Tensor& ids, const Tensor& targets, const Documents& documents) {
    model->set_step({.training = true, .documents = documents});
    const Var now = model->logits(model->hidden(ids));
    std::ranges::copy(now.value().to_vector<double>(), std::back_inserter(logits));
    backward(cross_entropy(now, targets.contiguous().reshape({-1}), 0.25).mean);
  }
  std::vector<double> gradients() const {
    std::vector<double> all;
    model->zero_missing_gradients();
    for (const FlatUnit& unit : model->units())
      std::ranges::copy(unit.grads.to_vector<double>(), std::back_inserter(all));
    return all;
  }
  std::unique_ptr<LanguageModel> model;
  std::vector<double> logits;
};

void expect_near(const std::vector<double>& found, const std::vector<double>& expected) {
  ASSERT_EQ(found.size(), expected.size());
  EXPECT_TRUE(std::ranges::any_of(expected, [](double x) { return x != 0; }));
  const auto tensor = [](const std::vector<double>& v) { return Tensor::of<double>(v, {std::ssize(v)}, make_arena()); };
  EXPECT_TRUE(std::ranges::all_of(found, [](double x) { return std::isfinite(x); }));
  EXPECT_LE(test::apart(tensor(found), tensor(expected)), 1e-12);
}

TEST(Documents, AreComputedIndependently) {
  constexpr int64_t kSequences = 2, kTokens = 80;  // more than a tile of 64 keys
  const auto random_tensor = [&](uint64_t step) {
    return test::made({kSequences, kTokens}, DType::int32, make_arena(),
                      [&](size_t i) { return Philox::named(1, "documents").below(12, i, step); });
  };
  const Tensor ids = random_tensor(0), targets = random_tensor(1);
  for (const Family family : {Family::gpt2, Family::llama})
    for (const Recompute recompute : {Recompute::none, Recompute::block}) {
      Passes packed(to_model_config(family, recompute)), alone(to_model_config(family, recompute));
      packed.pass(ids, targets, find_documents(ids, kEnd));
      for (int64_t b = 0; b < kSequences; ++b)
        for (int64_t begin = 0, end = 1; begin < kTokens; begin = end++) {
          while (end < kTokens && ids.data<int32_t>()[b * kTokens + end - 1] != kEnd) ++end;
          const auto document = [&](const Tensor& t) {
            return t.narrow(0, b, 1).narrow(1, begin, end - begin).clone();
          };
          alone.pass(document(ids), document(targets), {});
        }
      expect_near(packed.logits, alone.logits);
      expect_near(packed.gradients(), alone.gradients());
    }
}

}  // namespace
}  // namespace tessera
