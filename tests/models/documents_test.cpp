// Documents that lie one after another in a sequence are computed as if each were alone.
#include <gtest/gtest.h>

#include "models/language_model.h"

namespace tessera {
namespace {

constexpr int32_t kEnd = 3;

TEST(Documents, BeginAfterTheTokenThatEndsThem) {
  const ArenaPtr arena = make_arena();
  const std::vector<int32_t> ids = {7, 5, 3, 5, 6, 8, 3, 3, 4, 3, 7, 7, 7, 7, 7, 7, 7, 3};
  const Documents d = documents_of(Tensor::of<int32_t>(ids, {2, 9}, arena), kEnd);
  EXPECT_EQ(d.starts.to_vector<int32_t>(),
            (std::vector<int32_t>{0, 0, 0, 3, 3, 3, 3, 7, 8, 0, 1, 1, 1, 1, 1, 1, 1, 1}));
  EXPECT_EQ(d.positions.to_vector<int32_t>(),
            (std::vector<int32_t>{0, 1, 2, 0, 1, 2, 3, 0, 0, 0, 0, 1, 2, 3, 4, 5, 6, 7}));
  EXPECT_THROW(documents_of(Tensor::range(4, arena), kEnd), Error);
}

ModelConfig config_of(Family family, Recompute recompute) {
  ModelConfig c{
      .family = family, .layers = 2, .heads = 2, .channels = 16, .context = 80, .vocab = 12, .recompute = recompute};
  if (family == Family::llama) c.kv_heads = 1;
  return c;
}

struct Passes {
  std::vector<double> logits, gradients;
};

std::unique_ptr<LanguageModel> fresh(const ModelConfig& config, const ArenaPtr& arena) {
  std::unique_ptr<LanguageModel> model = make_model(config);
  model->materialize(5, arena, DType::float64, DType::float64);
  return model;
}

// Adds up the gradients of tokens (B, T) and of their logits' part of one loss.
void pass(LanguageModel& model, const Tensor& ids, const Tensor& targets, const Documents& documents, Passes& run) {
  model.set_step({.training = true, .documents = documents});
  const Var logits = model.logits(model.hidden(ids));
  const std::vector<double> values = logits.value().to_vector<double>();
  run.logits.insert(run.logits.end(), values.begin(), values.end());
  backward(cross_entropy(logits, targets.contiguous().reshape({-1}), 0.25).mean);
}

void take_gradients(LanguageModel& model, Passes& run) {
  model.zero_missing_gradients();
  for (const FlatUnit& unit : model.units())
    for (const double g : unit.grads.to_vector<double>()) run.gradients.push_back(g);
}

void expect_near(const std::vector<double>& found, const std::vector<double>& expected) {
  ASSERT_EQ(found.size(), expected.size());
  double most = 0, largest = 0;
  for (size_t i = 0; i < found.size(); ++i) {
    most = std::max(most, std::isfinite(found[i]) ? std::abs(found[i] - expected[i]) : INFINITY);
    largest = std::max(largest, std::abs(expected[i]));
  }
  EXPECT_LE(most / largest, 1e-12);
}

TEST(Documents, AreComputedAsIfAlone) {
  constexpr int64_t kSequences = 2, kTokens = 80;  // tiles of 64 keys, and more
  const ArenaPtr arena = make_arena();
  const Tensor ids = Tensor::empty({kSequences, kTokens}, DType::int32, arena), targets = ids.clone();
  const Philox random = Philox::named(1, "documents");
  for (int64_t i = 0; i < ids.numel(); ++i) {
    ids.data<int32_t>()[i] = static_cast<int32_t>(random.below(12, static_cast<uint64_t>(i)));
    targets.data<int32_t>()[i] = static_cast<int32_t>(random.below(12, static_cast<uint64_t>(i), 1));
  }
  for (const Family family : {Family::gpt2, Family::llama})
    for (const Recompute recompute : {Recompute::none, Recompute::block}) {
      Passes packed, alone;
      const auto model = fresh(config_of(family, recompute), arena), other = fresh(config_of(family, recompute), arena);
      pass(*model, ids, targets, documents_of(ids, kEnd), packed);
      take_gradients(*model, packed);
      for (int64_t b = 0; b < kSequences; ++b)
        for (int64_t begin = 0, end = 1; begin < kTokens; begin = end++) {
          while (end < kTokens && ids.data<int32_t>()[b * kTokens + end - 1] != kEnd) ++end;
          const auto document = [&](const Tensor& t) {
            return t.narrow(0, b, 1).narrow(1, begin, end - begin).clone();
          };
          pass(*other, document(ids), document(targets), {}, alone);
        }
      take_gradients(*other, alone);
      expect_near(packed.logits, alone.logits);
      expect_near(packed.gradients, alone.gradients);
    }
}

}  // namespace
}  // namespace tessera
