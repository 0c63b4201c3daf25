// Models of the Llama family against two that others wrote: logits, loss and every gradient of Hugging Face's
// transformers in float32 (tests/models/fixtures), and of a plain PyTorch model in float64 (tests/compare). And the
// tokens that a cache decodes against the forward pass.

#include "tests/hub/support.h"
#include "tests/support/gpu.h"
#include "tests/support/python.h"
#include "tests/support/tensors.h"

namespace tessera {
namespace {

constexpr std::array kVariants{"plain",  "grouped", "untied", "linear", "llama3", "yarn",
                               "biases", "biased",  "normed", "theta",  "slides"};

// Logits, loss and every gradient, by the names of our parameters.
using Results = std::map<std::string, std::vector<double>>;

// Numbers of a file for each of our parameters; `kind` is "" for values and "grad." for gradients.
Results joined(const Safetensors& file, const std::string& kind, const ModelConfig& config) {
  Results out;
  for (const HubTensor& t : hub_tensors(config))
    for (const HubTensor::Piece& piece : t.pieces) {
      const std::vector<double> values = values_of<double>(file.at(kind + piece.name));
      out[t.name].insert(out[t.name].end(), values.begin(), values.end());
    }
  return out;
}

std::unique_ptr<LanguageModel> model_of(const Safetensors& fixture, DType dtype, const ArenaPtr& arena) {
  auto made = make_model(parse_hub_config(fixture.metadata().at("config"), "config"));
  made->materialize(1, arena, dtype, dtype);
  const Results values = joined(fixture, "", made->config);
  for (const Parameter* p : made->parameters()) {
    Tensor value = p->var.value();
    value.copy_from(Tensor::of<double>(values.at(p->name), p->local(), arena->host()).to(dtype).to(arena));
  }
  return made;
}

// Results of a fixture's model, computed here.
Results computed(const Safetensors& fixture, DType dtype, const ArenaPtr& arena) {
  const auto model = model_of(fixture, dtype, arena);
  const Tensor ids = rows_of(fixture, "ids").to(arena), targets = rows_of(fixture, "targets").to(arena);
  Results out;
  {
    const NoGrad no_grad;
    out["logits"] = test::numbers(model->logits(model->hidden(ids)).value());
  }
  const Loss loss = model->loss(ids, targets, 1.0 / static_cast<double>(targets.numel()));
  out["loss"] = test::numbers(loss.mean.value());
  model->clear_gradients();
  backward(loss.mean);
  for (const Parameter* p : model->parameters())
    if (p->var.grad().defined()) out[p->name] = test::numbers(p->var.grad());
  return out;
}

// Results that a file holds for a fixture's model.
Results written(const Safetensors& fixture, const Safetensors& file) {
  const ModelConfig config = parse_hub_config(fixture.metadata().at("config"), "config");
  Results out = joined(file, "grad.", config);
  size_t parts = 0;
  for (const HubTensor& t : hub_tensors(config)) parts += t.pieces.size();
  for (const TensorBytes& t : file.tensors()) parts -= t.name.starts_with("grad.") ? 1 : 0;
  EXPECT_EQ(parts, 0U) << "gradients that belong to no parameter";
  for (const char* name : {"logits", "loss"}) out[name] = values_of<double>(file.at(name));
  return out;
}

void expect_near(const Results& ours, const Results& theirs, double bound) {
  EXPECT_EQ(ours.size(), theirs.size());
  for (const auto& [name, numbers] : theirs) {
    ASSERT_TRUE(ours.contains(name)) << name;
    EXPECT_LE(test::distance(ours.at(name), numbers), bound) << name;
  }
}

// The logits that a cache decodes, token by token, are those of a forward pass over all.
void expect_decoding(const Safetensors& fixture, const ArenaPtr& arena) {
  const auto model = model_of(fixture, DType::float64, arena);
  const ModelConfig& c = model->config;
  constexpr int64_t kBatch = 2, kTokens = 20;
  TextCache first = model->cache(), second = model->cache();
  const std::array texts{&first, &second};
  const auto last = static_cast<double>(c.vocab - 1);
  const Tensor ids = test::drawn({kBatch, kTokens}, DType::int32, "tokens", 0, last).to(arena);
  const NoGrad no_grad;
  const Tensor logits = model->logits(model->hidden(ids)).value();
  const Tensor whole = logits.on_host().to(DType::float64).reshape({kBatch, kTokens, c.vocab});
  for (int64_t t = 0; t < kTokens; ++t)
    EXPECT_LE(test::distance(model->decode(ids.narrow(1, t, 1).contiguous(), texts), whole.select(1, t)), 1e-12) << t;
  int64_t bytes = 0;
  for (const TextCache* text : texts)
    for (const KvCache& cache : *text) bytes += cache.keys.nbytes() + cache.values.nbytes();
  EXPECT_EQ(bytes, kBatch * 2 * c.layers * c.context * c.key_heads() * c.head_size() * 8);
}

void for_each_variant(const std::function<void(const Safetensors&)>& check) {
  for (const char* variant : kVariants) {
    SCOPED_TRACE(variant);
    check(fixture_of(variant));
  }
}

TEST(LlamaReference, LogitsLossAndGradientsAreThoseOfTransformers) {
  for_each_variant([&](const Safetensors& fixture) {
    expect_near(computed(fixture, DType::float32, make_arena()), written(fixture, fixture), 1e-5);
  });
}

TEST(LlamaReference, DecodingTokenByTokenIsTheForwardPass) {
  for_each_variant([&](const Safetensors& fixture) { expect_decoding(fixture, make_arena()); });
}

TEST(LlamaReference64, LogitsLossAndGradientsAreThoseOfPyTorch) {
  if (const std::string why = test::missing("torch"); !why.empty()) GTEST_SKIP() << why;
  const test::Exchange exchange;
  std::string fixtures;
  for (const char* variant : kVariants) fixtures += fmt::format(" '{}'", fixture_path(variant).string());
  exchange.run(TESSERA_SOURCE_DIR "/tests/compare/llama_reference.py", "." + fixtures);
  for (const char* variant : kVariants) {
    SCOPED_TRACE(variant);
    const Safetensors model = fixture_of(variant), pytorch(exchange.path(fixture_path(variant).filename()));
    expect_near(computed(model, DType::float64, make_arena()), written(model, pytorch), 1e-10);
  }
}

using LlamaReferenceGpu = test::OnGpu;

// The CPU's float64 stands for transformers', whose own fp32 has rounded too.
TEST_F(LlamaReferenceGpu, LogitsLossAndGradientsAreThoseOfTransformers) {
  for_each_variant([&](const Safetensors& fixture) {
    expect_near(computed(fixture, DType::float32, arena), computed(fixture, DType::float64, make_arena()), 1e-5);
  });
}

TEST_F(LlamaReferenceGpu, DecodingTokenByTokenIsTheForwardPass) {
  if (const std::string why = test::no_float64(); !why.empty()) GTEST_SKIP() << why;
  for_each_variant([&](const Safetensors& fixture) { expect_decoding(fixture, arena); });
}

}  // namespace
}  // namespace tessera
