// Llama models against two independent implementations: logits, loss and every gradient of Hugging Face's transformers
// in float32 (tests/models/fixtures), and of a plain PyTorch model in float64 (tests/compare). Also tokens decoded with
// a cache against the forward pass.
//
// Configurations and tensor names are read here according to the documentation of transformers, without Tessera's
// parser (hub/config.h), so that a fault in that parser cannot affect both sides; the parser is compared with these.

#include <array>
#include <cmath>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "base/setting.h"
#include "tests/hub/support.h"
#include "tests/support/gpu.h"
#include "tests/support/python.h"
#include "tests/support/tensors.h"

namespace tessera {
namespace {

constexpr std::array kVariants{"plain",  "grouped", "untied", "linear", "llama3", "yarn",
                               "biases", "biased",  "normed", "theta",  "slides"};

// Logits, loss and every gradient, by Tessera's parameter names.
using Results = std::map<std::string, std::vector<double>>;

ModelConfig to_model_config(const Safetensors& fixture) {
  const Json all = Json::parse(fixture.metadata().at("config")), rope = all.at("rope_parameters");
  const std::string model = all.at("model_type"), positions = rope.at("rope_type");
  ModelConfig c{.family = Family::llama, .layers = all.at("num_hidden_layers"), .heads = all.at("num_attention_heads")};
  c.channels = all.at("hidden_size"), c.context = all.at("max_position_embeddings"), c.vocab = all.at("vocab_size");
  c.tied = all.at("tie_word_embeddings"), c.kv_heads = all.at("num_key_value_heads");
  c.head_dim = all.value("head_dim", c.channels / c.heads), c.ffn = all.at("intermediate_size");
  c.norm_eps = all.at("rms_norm_eps"), c.rotary.theta = rope.at("rope_theta");
  if (all.contains("sliding_window") && all["sliding_window"].is_number()) c.window = all["sliding_window"];
  c.proj_bias = all.value("attention_bias", false), c.mlp_bias = all.value("mlp_bias", false);
  c.qkv_bias = c.proj_bias || model == "qwen2", c.qk_norm = model == "qwen3";
  if (positions == "default") return c;
  c.rotary.factor = rope.at("factor");
  c.rotary.scaling = positions == "linear" ? RopeScaling::linear : RopeScaling::llama3;
  if (positions != "linear") c.rotary.original_context = rope.at("original_max_position_embeddings");
  if (positions == "llama3") {
    c.rotary.low_freq_factor = rope.at("low_freq_factor"), c.rotary.high_freq_factor = rope.at("high_freq_factor");
  } else if (positions == "yarn") {
    c.rotary.scaling = RopeScaling::yarn, c.rotary.attention_factor = 0.1 * std::log(c.rotary.factor) + 1;
    c.rotary.low_freq_factor = rope.value("beta_slow", 1.0), c.rotary.high_freq_factor = rope.value("beta_fast", 32.0);
  }
  return c;
}

// The hub tensors whose concatenated rows form Tessera's parameter, such as "blocks.0.attn.qkv.weight".
std::vector<std::string> hub_names(const std::string& ours) {
  static const std::map<std::string, std::vector<std::string>> table{
      {"tokens", {"model.embed_tokens"}},
      {"norm", {"model.norm"}},
      {"head", {"lm_head"}},
      {"norm1", {"input_layernorm"}},
      {"norm2", {"post_attention_layernorm"}},
      {"attn.norm_q", {"self_attn.q_norm"}},
      {"attn.norm_k", {"self_attn.k_norm"}},
      {"attn.qkv", {"self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"}},
      {"attn.proj", {"self_attn.o_proj"}},
      {"mlp.gate_up", {"mlp.gate_proj", "mlp.up_proj"}},
      {"mlp.down", {"mlp.down_proj"}}};
  const std::string layers = "blocks.";
  const bool in_layer = ours.starts_with(layers);
  const size_t begin = in_layer ? ours.find('.', layers.size()) + 1 : 0, end = ours.rfind('.');
  const std::string above = in_layer ? "model.layers." + ours.substr(layers.size(), begin - layers.size()) : "";
  std::vector<std::string> out = table.at(ours.substr(begin, end - begin));
  for (std::string& name : out) name = above + name + ours.substr(end);
  return out;
}

// The values in a file for each parameter of Tessera; `kind` is "" for values and "grad." for gradients.
Results joined(const Safetensors& file, const std::string& kind, LanguageModel& model) {
  Results out;
  for (const Parameter* p : model.parameters())
    for (const std::string& name : hub_names(p->name)) {
      const std::vector<double> values = copy_values<double>(file.at(kind + name));
      out[p->name].insert(out[p->name].end(), values.begin(), values.end());
    }
  return out;
}

std::unique_ptr<LanguageModel> load_model(const Safetensors& fixture, DType dtype, const ArenaPtr& arena) {
  auto made = make_model(to_model_config(fixture));
  made->materialize(1, arena, dtype, dtype);
  const Results values = joined(fixture, "", *made);
  for (const Parameter* p : made->parameters()) {
    Tensor value = p->var.value();
    value.copy_from(Tensor::of<double>(values.at(p->name), p->local(), arena->host()).to(dtype).to(arena));
  }
  return made;
}

// Results of Tessera for a fixture's model.
Results computed(const Safetensors& fixture, DType dtype, const ArenaPtr& arena) {
  const auto model = load_model(fixture, dtype, arena);
  const Tensor ids = make_rows(fixture, "ids").to(arena), targets = make_rows(fixture, "targets").to(arena);
  Results out;
  {
    const NoGrad no_grad;
    out["logits"] = test::host_values(model->logits(model->hidden(ids)).value());
  }
  const Loss loss = model->loss(ids, targets, 1.0 / static_cast<double>(targets.numel()));
  out["loss"] = test::host_values(loss.mean.value());
  model->clear_gradients();
  backward(loss.mean);
  for (const Parameter* p : model->parameters())
    if (p->var.grad().defined()) out[p->name] = test::host_values(p->var.grad());
  return out;
}

// Results stored in a file for a fixture's model.
Results written(const Safetensors& fixture, const Safetensors& file) {
  const std::unique_ptr<LanguageModel> model = make_model(to_model_config(fixture));
  Results out = joined(file, "grad.", *model);
  size_t parts = 0;
  for (const Parameter* p : model->parameters()) parts += hub_names(p->name).size();
  for (const TensorBytes& t : file.tensors()) parts -= t.name.starts_with("grad.") ? 1 : 0;
  EXPECT_EQ(parts, 0U) << "gradients without a parameter";
  for (const char* name : {"logits", "loss"}) out[name] = copy_values<double>(file.at(name));
  return out;
}

void expect_near(const Results& ours, const Results& theirs, double bound) {
  EXPECT_EQ(ours.size(), theirs.size());
  for (const auto& [name, reference] : theirs) {
    ASSERT_TRUE(ours.contains(name)) << name;
    EXPECT_LE(test::distance(ours.at(name), reference), bound) << name;
  }
}

// The logits decoded token by token with a cache equal those of a forward pass.
void expect_decoding(const Safetensors& fixture, const ArenaPtr& arena) {
  const auto model = load_model(fixture, DType::float64, arena);
  const ModelConfig& c = model->config;
  constexpr int64_t kBatch = 2, kTokens = 20;
  TextCache first = model->cache(), second = model->cache();
  const std::array texts{&first, &second};
  const auto last = static_cast<double>(c.vocab - 1);
  const Tensor ids = test::random_tensor({kBatch, kTokens}, DType::int32, "tokens", 0, last).to(arena);
  const NoGrad no_grad;
  const Tensor logits = model->logits(model->hidden(ids)).value();
  const Tensor full = logits.on_host().to(DType::float64).reshape({kBatch, kTokens, c.vocab});
  for (int64_t t = 0; t < kTokens; ++t)
    EXPECT_LE(test::distance(model->decode(ids.narrow(1, t, 1).contiguous(), texts), full.select(1, t)), 1e-12) << t;
  int64_t bytes = 0;
  for (const TextCache* text : texts)
    for (const KvCache& cache : *text) bytes += cache.keys.nbytes() + cache.values.nbytes();
  EXPECT_EQ(bytes, kBatch * 2 * c.layers * c.context * c.key_heads() * c.head_size() * 8);
}

void for_each_variant(const std::function<void(const Safetensors&)>& check) {
  for (const char* variant : kVariants) {
    SCOPED_TRACE(variant);
    check(open_fixture(variant));
  }
}

// Tessera's parser yields the configurations and tensor locations read above.
TEST(LlamaReference, HubParserReadsReferenceConfigurations) {
  for_each_variant([&](const Safetensors& fixture) {
    ModelConfig read = parse_hub_config(fixture.metadata().at("config"), "config"), expected = to_model_config(fixture);
    EXPECT_EQ(difference(field_descriptors(read), field_descriptors(expected)), "");
    for (const HubTensor& t : hub_tensors(expected)) {
      std::vector<std::string> names;
      for (const HubTensor::Slice& slice : t.slices) names.push_back(slice.name);
      EXPECT_EQ(names, hub_names(t.name));
    }
  });
}

TEST(LlamaReference, LogitsLossAndGradientsMatchTransformers) {
  for_each_variant([&](const Safetensors& fixture) {
    expect_near(computed(fixture, DType::float32, make_arena()), written(fixture, fixture), 1e-5);
  });
}

TEST(LlamaReference, IncrementalDecodingMatchesForwardPass) {
  for_each_variant([&](const Safetensors& fixture) { expect_decoding(fixture, make_arena()); });
}

TEST(LlamaReference64, LogitsLossAndGradientsMatchPyTorch) {
  if (const std::string why = test::missing("torch"); !why.empty()) GTEST_SKIP() << why;
  const test::Exchange exchange;
  std::string fixtures;
  for (const char* variant : kVariants) fixtures += fmt::format(" '{}'", fixture_path(variant).string());
  exchange.run(TESSERA_SOURCE_DIR "/tests/compare/llama_reference.py", "." + fixtures);
  for (const char* variant : kVariants) {
    SCOPED_TRACE(variant);
    const Safetensors model = open_fixture(variant), pytorch(exchange.path(fixture_path(variant).filename()));
    expect_near(computed(model, DType::float64, make_arena()), written(model, pytorch), 1e-10);
  }
}

using LlamaReferenceGpu = test::OnGpu;

// The reference is float64 on the CPU, because transformers' own fp32 is rounded too.
TEST_F(LlamaReferenceGpu, LogitsLossAndGradientsMatchTransformers) {
  for_each_variant([&](const Safetensors& fixture) {
    expect_near(computed(fixture, DType::float32, arena), computed(fixture, DType::float64, make_arena()), 1e-5);
  });
}

TEST_F(LlamaReferenceGpu, IncrementalDecodingMatchesForwardPass) {
  if (const std::string why = test::no_float64(); !why.empty()) GTEST_SKIP() << why;
  for_each_variant([&](const Safetensors& fixture) { expect_decoding(fixture, arena); });
}

}  // namespace
}  // namespace tessera
