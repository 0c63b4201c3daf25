// Models of the Llama family against two that others wrote: logits, loss and every gradient of Hugging Face's
// transformers in float32 (tests/models/fixtures), and of a plain PyTorch model in float64 (tests/compare). And the
// tokens that a cache decodes against the forward pass.

#include <nlohmann/json.hpp>

#include "data/json.h"
#include "data/safetensors.h"
#include "models/language_model.h"
#include "tests/support/gpu.h"
#include "tests/support/python.h"
#include "tests/support/tensors.h"

namespace tessera {
namespace {

using Json = nlohmann::json;

constexpr std::array kVariants{"plain",  "grouped", "untied", "linear", "llama3", "yarn",
                               "biases", "biased",  "normed", "theta",  "slides"};

RotaryOptions rotary_of(const Json& rope) {
  const std::string type = rope.at("rope_type");
  RotaryOptions o{.theta = rope.at("rope_theta")};
  if (type == "default") return o;
  o.factor = rope.at("factor");
  o.scaling = type == "linear" ? RopeScaling::linear : type == "yarn" ? RopeScaling::yarn : RopeScaling::llama3;
  if (type == "linear") return o;
  if (type == "yarn") {
    o.high_freq_factor = rope.at("beta_fast");
    o.original_context = rope.at("original_max_position_embeddings");
    o.attention_factor = 0.1 * std::log(o.factor) + 1;
    return o;
  }
  o.low_freq_factor = rope.at("low_freq_factor");
  o.high_freq_factor = rope.at("high_freq_factor");
  o.original_context = rope.at("original_max_position_embeddings");
  return o;
}

// Translates Hugging Face's configuration.
ModelConfig config_of(const Json& c) {
  const std::string type = c.at("model_type");
  return {.family = Family::llama,
          .layers = c.at("num_hidden_layers"),
          .heads = c.at("num_attention_heads"),
          .channels = c.at("hidden_size"),
          .context = c.at("max_position_embeddings"),
          .vocab = c.at("vocab_size"),
          .tied = c.at("tie_word_embeddings"),
          .kv_heads = c.at("num_key_value_heads"),
          .head_dim = c.value("head_dim", int64_t{0}),
          .ffn = c.at("intermediate_size"),
          .norm_eps = c.at("rms_norm_eps"),
          .rotary = rotary_of(c.at("rope_parameters")),
          .window = c.value("sliding_window", 0),
          .qkv_bias = type == "qwen2" || c.value("attention_bias", false),
          .proj_bias = c.value("attention_bias", false),
          .mlp_bias = c.value("mlp_bias", false),
          .qk_norm = type == "qwen3"};
}

// Hugging Face's tensors that lie one below the other in one of our parameters.
std::vector<std::string> parts_of(const std::string& name) {
  static const std::map<std::string, std::string> outside{{"tokens.weight", "model.embed_tokens.weight"},
                                                          {"norm.weight", "model.norm.weight"},
                                                          {"head.weight", "lm_head.weight"}};
  static const std::map<std::string, std::vector<std::string>> inside{
      {"norm1.weight", {"input_layernorm.weight"}},
      {"attn.qkv.weight", {"self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight"}},
      {"attn.qkv.bias", {"self_attn.q_proj.bias", "self_attn.k_proj.bias", "self_attn.v_proj.bias"}},
      {"attn.norm_q.weight", {"self_attn.q_norm.weight"}},
      {"attn.norm_k.weight", {"self_attn.k_norm.weight"}},
      {"attn.proj.weight", {"self_attn.o_proj.weight"}},
      {"attn.proj.bias", {"self_attn.o_proj.bias"}},
      {"norm2.weight", {"post_attention_layernorm.weight"}},
      {"mlp.gate_up.weight", {"mlp.gate_proj.weight", "mlp.up_proj.weight"}},
      {"mlp.gate_up.bias", {"mlp.gate_proj.bias", "mlp.up_proj.bias"}},
      {"mlp.down.weight", {"mlp.down_proj.weight"}},
      {"mlp.down.bias", {"mlp.down_proj.bias"}}};
  if (const auto found = outside.find(name); found != outside.end()) return {found->second};
  const size_t number = std::string("blocks.").size(), dot = name.find('.', number);
  std::vector<std::string> parts = inside.at(name.substr(dot + 1));
  for (std::string& part : parts) part = fmt::format("model.layers.{}.{}", name.substr(number, dot - number), part);
  return parts;
}

// A fixture of tests/models/fixtures/make.py, or numbers for it in another file: on the host.
class Reference {
 public:
  explicit Reference(const std::filesystem::path& path) : file_(path) {}
  static std::filesystem::path path(const std::string& variant) {
    return TESSERA_SOURCE_DIR "/tests/models/fixtures/" + variant + ".safetensors";
  }

  Tensor read(const std::string& name) const {
    const TensorBytes& found = file_.at(name);
    Tensor out = Tensor::empty(Shape(found.shape), found.dtype, make_arena());
    std::ranges::copy(found.bytes, out.raw());
    return out;
  }
  std::vector<double> numbers(const std::string& name) const {
    return read(name).to(DType::float64).to_vector<double>();
  }
  // The numbers that belong to a parameter of ours; `kind` is "" for its value and "grad." for its gradient.
  std::vector<double> joined(const std::string& kind, const Parameter& p) const {
    std::vector<double> out;
    for (const std::string& part : parts_of(p.name)) {
      const std::vector<double> values = numbers(kind + part);
      out.insert(out.end(), values.begin(), values.end());
    }
    return out;
  }
  // How many of its tensors are gradients.
  int64_t gradients() const {
    return std::ranges::count_if(file_.tensors(), [](const TensorBytes& t) { return t.name.starts_with("grad."); });
  }

  std::unique_ptr<LanguageModel> model(DType dtype, const ArenaPtr& arena) const {
    auto made = make_model(config_of(parse_json(file_.metadata().at("config"), "config")));
    made->materialize(1, arena, dtype, dtype);
    for (const Parameter* p : made->parameters()) {
      Tensor value = p->var.value();
      value.copy_from(Tensor::of<double>(joined("", *p), p->local(), arena->host()).to(dtype).to(arena));
    }
    return made;
  }

 private:
  Safetensors file_;
};

// Logits, loss and every gradient, by the names of our parameters.
using Results = std::map<std::string, std::vector<double>>;

// Results of a fixture's model, computed here.
Results computed(const Reference& fixture, DType dtype, const ArenaPtr& arena) {
  const auto model = fixture.model(dtype, arena);
  const Tensor ids = fixture.read("ids").to(arena), targets = fixture.read("targets").to(arena);
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
Results written(const Reference& fixture, const Reference& file) {
  Results out{{"logits", file.numbers("logits")}, {"loss", file.numbers("loss")}};
  const auto model = fixture.model(DType::float32, make_arena());
  int64_t parts = 0;
  for (const Parameter* p : model->parameters()) {
    out[p->name] = file.joined("grad.", *p);
    parts += std::ssize(parts_of(p->name));
  }
  EXPECT_EQ(parts, file.gradients());
  return out;
}

void expect_near(const Results& ours, const Results& theirs, double bound) {
  EXPECT_EQ(ours.size(), theirs.size());
  for (const auto& [name, numbers] : theirs) {
    ASSERT_TRUE(ours.contains(name)) << name;
    EXPECT_LE(test::distance(ours.at(name), numbers), bound) << name;
  }
}

int32_t likeliest(const Tensor& logits) {
  const std::vector<double> v = test::numbers(logits);
  return static_cast<int32_t>(std::ranges::max_element(v) - v.begin());
}

// Takes the likeliest token twenty times: each one's logits are as near as `bound` to those of a forward pass over all.
void expect_decoding(const Reference& fixture, DType dtype, const ArenaPtr& arena, double bound) {
  const auto model = fixture.model(dtype, arena);
  const ModelConfig& c = model->config;
  constexpr int64_t kBatch = 2, kTokens = 20;
  TextCache first = model->cache(), second = model->cache();
  const std::array texts{&first, &second};
  const Tensor ids = Tensor::zeros({kBatch, kTokens}, DType::int32, arena->host());
  std::vector<Tensor> decoded;
  for (int64_t b = 0; b < kBatch; ++b) ids.data<int32_t>()[b * kTokens] = static_cast<int32_t>(7 + b);
  for (int64_t t = 0; t < kTokens; ++t) {
    decoded.push_back(model->decode(ids.narrow(1, t, 1).contiguous().to(arena), texts));
    for (int64_t b = 0; b < kBatch && t + 1 < kTokens; ++b)
      ids.data<int32_t>()[b * kTokens + t + 1] = likeliest(decoded.back().select(0, b));
  }
  int64_t bytes = 0;
  for (const TextCache* text : texts)
    for (const KvCache& cache : *text) bytes += cache.keys.nbytes() + cache.values.nbytes();
  const int64_t k = c.kv_heads * c.head_size();
  EXPECT_EQ(bytes, kBatch * 2 * c.layers * c.context * k * size_of(dtype));
  const NoGrad no_grad;
  const Tensor logits = model->logits(model->hidden(ids.to(arena))).value();
  const Tensor whole = logits.on_host().to(DType::float64).reshape({kBatch, kTokens, c.vocab});
  for (int64_t t = 0; t < kTokens; ++t)
    EXPECT_LE(test::distance(test::numbers(decoded[static_cast<size_t>(t)]), test::numbers(whole.select(1, t))), bound)
        << "token " << t;
}

class LlamaReference : public testing::TestWithParam<const char*> {
 protected:
  const Reference fixture_{Reference::path(GetParam())};
};

TEST_P(LlamaReference, LogitsLossAndGradientsAreThoseOfTransformers) {
  expect_near(computed(fixture_, DType::float32, make_arena()), written(fixture_, fixture_), 1e-5);
}

TEST_P(LlamaReference, DecodingTokenByTokenIsTheForwardPass) {
  expect_decoding(fixture_, DType::float64, make_arena(), 1e-12);
}

INSTANTIATE_TEST_SUITE_P(Variants, LlamaReference, testing::ValuesIn(kVariants),
                         [](const auto& variant) { return std::string(variant.param); });

TEST(LlamaReference64, LogitsLossAndGradientsAreThoseOfPyTorch) {
  if (const std::string why = test::missing("torch"); !why.empty()) GTEST_SKIP() << why;
  const test::Exchange exchange;
  std::string fixtures;
  for (const char* variant : kVariants) fixtures += fmt::format(" '{}'", Reference::path(variant).string());
  exchange.run(TESSERA_SOURCE_DIR "/tests/compare/llama_reference.py", "." + fixtures);
  for (const char* variant : kVariants) {
    SCOPED_TRACE(variant);
    const std::filesystem::path fixture = Reference::path(variant);
    const Reference model(fixture), pytorch(exchange.path(fixture.filename()));
    expect_near(computed(model, DType::float64, make_arena()), written(model, pytorch), 1e-10);
  }
}

using LlamaReferenceGpu = test::OnGpu;

// The CPU's float64 stands for transformers', whose own fp32 has rounded too.
TEST_F(LlamaReferenceGpu, LogitsLossAndGradientsAreThoseOfTransformers) {
  for (const char* variant : kVariants) {
    SCOPED_TRACE(variant);
    const Reference fixture(Reference::path(variant));
    expect_near(computed(fixture, DType::float32, arena), computed(fixture, DType::float64, make_arena()), 1e-5);
  }
}

TEST_F(LlamaReferenceGpu, DecodingTokenByTokenIsTheForwardPass) {
  if (const std::string why = test::no_float64(); !why.empty()) GTEST_SKIP() << why;
  for (const char* variant : kVariants) {
    SCOPED_TRACE(variant);
    expect_decoding(Reference(Reference::path(variant)), DType::float64, arena, 1e-12);
  }
}

}  // namespace
}  // namespace tessera
