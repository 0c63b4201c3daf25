// Directories written by Tessera are read by the transformers library, and vice versa. Requires Python with
// transformers; tests/hub/folder_test.cpp uses its stored results.
#include <cstdint>
#include <map>
#include <numeric>
#include <string>
#include <vector>

#include "tests/hub/support.h"
#include "tests/support/python.h"

namespace tessera {
namespace {
constexpr int64_t kBatch = 2, kTokens = 12;

std::vector<std::pair<std::string, ModelConfig>> samples() {
  const ModelConfig gpt2{.layers = 2, .heads = 2, .channels = 16, .context = 32, .vocab = 40, .ffn = 24};
  ModelConfig llama = gpt2;
  llama.family = Family::llama, llama.kv_heads = 1;
  ModelConfig scaled = llama, qwen2 = llama, qwen3 = llama;
  scaled.tied = false;
  scaled.rotary = {.theta = 100, .scaling = RopeScaling::llama3, .factor = 4, .original_context = 16};
  scaled.rotary.low_freq_factor = 0.3, scaled.rotary.high_freq_factor = 2;
  qwen2.qkv_bias = true;
  qwen3.qk_norm = true, qwen3.head_dim = 12;
  ModelConfig exact = gpt2, yarn = scaled, biases = llama, slides = llama, sliding_qwen2 = qwen2;
  exact.gelu = Activation::gelu_erf;
  yarn.rotary.scaling = RopeScaling::yarn, yarn.rotary.attention_factor = 1.2;
  biases.qkv_bias = biases.proj_bias = biases.mlp_bias = true;
  slides.window = sliding_qwen2.window = 5;
  ModelConfig mixtral = llama, qwen3_moe = qwen3;
  mixtral.experts.count = 4;
  qwen3_moe.experts.count = 6, qwen3_moe.experts.per_token = 3;
  qwen3_moe.experts.softmax = RouterSoftmax::all;
  return {{"mixtral", mixtral}, {"qwen3_moe", qwen3_moe}, {"gpt2", gpt2},     {"llama", llama},
          {"scaled", scaled},   {"qwen2", qwen2},         {"qwen3", qwen3},   {"exact", exact},
          {"yarn", yarn},       {"biases", biases},       {"slides", slides}, {"sliding_qwen2", sliding_qwen2}};
}

// A model with initial weights is nearly linear and has zero biases, so random values are added.
void spread(LanguageModel& model) {
  for (const Parameter* p : model.parameters()) {
    const Tensor& values = p->var.value();
    const Philox random = Philox::named(1, p->name);
    for (int64_t i = 0; i < values.numel(); ++i)
      values.data<float>()[i] += 0.2F * static_cast<float>(random.normal(static_cast<uint64_t>(i)));
  }
}

std::vector<float> compute_logits(LanguageModel& model, const std::vector<int32_t>& ids) {
  const NoGrad no_grad;
  const Tensor rows = Tensor::constant<int32_t>(ids, {kBatch, kTokens}, make_arena());
  return model.logits(model.hidden(rows)).value().to_vector<float>();
}

std::vector<int32_t> some_ids() {
  std::vector<int32_t> ids(kBatch * kTokens);
  std::iota(ids.begin(), ids.end(), 7);
  return ids;
}

TEST(Transformers, ExchangesModelsInBothDirections) {
  if (const std::string why = test::missing("transformers"); !why.empty()) GTEST_SKIP() << why;
  const test::Exchange exchange;
  const std::vector<int32_t> ids = some_ids();
  std::string folders;
  std::vector<std::vector<float>> ours;
  for (const auto& [name, config] : samples()) {
    const auto model = random_model(config);
    spread(*model);
    fs::create_directory(exchange.path(name));
    write_hub_folder(exchange.path(name), config, {DType::float32, make_tensors(*model)});
    exchange.write<int32_t>(name + "/ids.bin", ids);
    ours.push_back(compute_logits(*model, ids));
    folders.append(" ").append(name);
  }
  exchange.run(TESSERA_SOURCE_DIR "/tests/compare/hub_folder.py", folders);
  for (size_t i = 0; const auto& [name, config] : samples()) {
    SCOPED_TRACE(name);
    const fs::path path = exchange.path(name);
    expect_near(exchange.read<float>(name + "/logits.bin"), ours[i]);
    EXPECT_TRUE(fs::exists(path / "again/model.safetensors.index.json"));
    const HubFolder again(path / "again");
    EXPECT_EQ(compute_logits(*load_model(again), ids), ours[i++]);
  }
}

// Published keys with small sizes: transformers and Tessera compute the same.
TEST(Transformers, MatchesOnPublishedConfigurations) {
  if (const std::string why = test::missing("transformers"); !why.empty()) GTEST_SKIP() << why;
  const test::Exchange exchange;
  exchange.run(TESSERA_SOURCE_DIR "/tests/compare/published_configurations.py",
               TESSERA_SOURCE_DIR "/tests/hub/fixtures/configurations.json");
  const std::vector<int32_t> ids = some_ids();
  int read = 0;
  for (int i = 0; i < 100; ++i) {
    const fs::path path = exchange.path(std::to_string(i));
    if (!fs::exists(path)) continue;
    SCOPED_TRACE(read_file(path / "config.json"));
    const HubFolder folder(path);
    expect_near(compute_logits(*load_model(folder), ids), exchange.read<float>(std::to_string(i) + "/logits.bin"));
    ++read;
  }
  EXPECT_GE(read, 40);
}

}  // namespace
}  // namespace tessera
