// config.json as other programs write it: configurations of published models, keys that would change the computation,
// keys that would not, and defaults of missing keys.

#include <algorithm>
#include <map>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "models/families.h"
#include "tests/hub/support.h"
#include "tests/support/texts.h"

namespace tessera {
namespace {

struct Said {
  ModelConfig config;
  std::vector<std::string> notes;
};
Said parsed(const std::string& text) {
  Said out;
  std::optional<GptqConfig> gptq;
  out.config = parse_hub_config(text, "config.json", &gptq, &out.notes);
  return out;
}

std::string in_words(const Said& said) {
  const ModelConfig& c = said.config;
  std::string out = fmt::format("{} {} layers, {}/{} heads of {}, {} channels, {} hidden, context {}, vocab {}, eps {}",
                                value_name(c.family), c.layers, c.heads, c.key_heads(), c.head_size(), c.channels,
                                c.hidden(), c.context, c.vocab, c.norm_eps);
  const RotaryOptions& r = c.rotary;
  if (c.family == Family::llama) out += fmt::format(", theta {}", r.theta);
  if (r.scaling != RopeScaling::none) out += fmt::format(", {} {}", value_name(r.scaling), r.factor);
  if (r.scaling == RopeScaling::llama3 || r.scaling == RopeScaling::yarn)
    out += fmt::format(" {} {} {}", r.low_freq_factor, r.high_freq_factor, r.original_context);
  if (r.scaling == RopeScaling::yarn) out += fmt::format(" times {:.4f}", r.attention_factor);
  if (c.window > 0) out += fmt::format(", window {}", c.window);
  if (c.tied) out += ", tied";
  if (c.gelu == Activation::gelu_erf) out += ", exact gelu";
  if (c.qkv_bias) out += ", biased";
  if (c.proj_bias) out += ", proj biased";
  if (c.mlp_bias) out += ", mlp biased";
  if (c.qk_norm) out += ", normed";
  if (c.experts.count > 0) out += fmt::format(", experts {}/{}", c.experts.count, c.experts.per_token);
  for (const std::string& note : said.notes) out += "; note: " + note.substr(note.find("computation: ") + 13);
  return out;
}

std::string refusal_message(const std::string& text) {
  std::string taken;
  const std::string refused = error_message([&] { taken = "taken: " + in_words(parsed(text)); }, Status::input);
  return taken.empty() ? refused : taken;
}

TEST(HubConfig, ReadsOrRejectsPublishedConfigurations) {
  const Json all = Json::parse(read_file(TESSERA_SOURCE_DIR "/tests/hub/fixtures/configurations.json"));
  int refused = 0, taken = 0;
  for (const Json& one : all.at("models")) {
    SCOPED_TRACE(one.at(0));
    Json config = all.at("bases").at(one.at(1).get<std::string>());
    config.update(one.at(2));
    const std::string expected = one.at(3).get<std::string>();
    const std::string found = refusal_message(config.dump());
    if (expected.starts_with("refused: ")) {
      ++refused;
      expect_has(found, "the key '" + expected.substr(9) + "': expected ");
    } else {
      ++taken;
      EXPECT_EQ(found, "taken: " + expected);
    }
  }
  EXPECT_GE(taken, 36);
  EXPECT_GE(refused, 20);
}

const Json kTiny{{"model_type", "llama"}, {"hidden_size", 16}, {"num_attention_heads", 2}, {"vocab_size", 50}};

// A harmful value is rejected by name, a harmless one has no effect.
TEST(HubConfig, ErrorsNameUnsupportedKeys) {
  const std::string plain = in_words(parsed(kTiny.dump()));
  const std::tuple<const char*, Json, Json> keys[] = {
      {"hidden_act", "gelu", "swish"},
      {"attn_logit_softcapping", 50.0, nullptr},
      {"final_logit_softcapping", 30.0, nullptr},
      {"embedding_multiplier", 12.0, 1.0},
      {"residual_multiplier", 0.22, 1},
      {"logits_scaling", 8.0, 1.0},
      {"attention_multiplier", 0.0156, nullptr},
      {"query_pre_attn_scalar", 256, nullptr},
      {"use_mrope", true, false},
      {"is_encoder_decoder", true, false},
      {"layer_types", {"linear_attention"}, {"full_attention"}},
      {"rope_scaling", {{"type", "longrope"}}, {{"type", "default"}}},
      {"rope_scaling", {{"type", "dynamic"}, {"factor", 2}}, {{"type", "linear"}, {"factor", 1.0}}},
      {"rope_parameters", {{"full_attention", Json::object()}}, nullptr},
      {"quantization_config", {{"quant_method", "awq"}}, nullptr},
      {"rms_norm_eps", "1e-6", 1e-6},
      {"head_dim", 7, nullptr},
      {"num_key_value_heads", 3, nullptr}};
  for (const auto& [key, harmful, harmless] : keys) {
    const std::string found = refusal_message(with(kTiny, key, harmful).dump());
    EXPECT_TRUE(found.find(key) != std::string::npos && !found.starts_with("taken")) << found;
    EXPECT_EQ(in_words(parsed(with(kTiny, key, harmless).dump())), plain) << key;
  }
  // Qwen2 has biases of q, k and v whatever a key specifies, and its class has no such key.
  const Json qwen = with(with(kTiny, "model_type", "qwen2"), "num_key_value_heads", 2);
  EXPECT_TRUE(in_words(parsed(with(qwen, "attention_bias", true).dump())).ends_with("biased; note: attention_bias"));
}

TEST(HubConfig, IgnoresUnusedKeys) {
  const std::string plain = in_words(parsed(kTiny.dump()));
  std::string deep(100, '[');
  deep.append(100, ']');
  for (const std::string value :
       {"null", "1e999", "-1e999", "NaN", "Infinity", "-Infinity", "[1, NaN, {\"a\": Infinity}]",
        "1000000000000000019884624838656", "{\"__float__\": \"Infinity\"}", deep.c_str(), "1, \"of_others\": 2",
        "\"NaN, 1e999\""}) {
    std::string text = kTiny.dump();
    text.insert(1, "\"of_others\": " + value + ", ");
    EXPECT_EQ(in_words(parsed(text)), plain + (value == "null" ? "" : "; note: of_others")) << text;
    text.replace(text.find("of_others"), 9, "use_cache");  // common enough not to need a note
    EXPECT_EQ(in_words(parsed(text)), plain + (text.find("of_others") == text.npos ? "" : "; note: of_others")) << text;
  }
  // A value that is read must be valid.
  for (const char* value : {"NaN", "1e999", "1, \"rms_norm_eps\": 2"}) {
    std::string text = kTiny.dump();
    text.insert(1, fmt::format("\"rms_norm_eps\": {}, ", value));
    expect_has(refusal_message(text), "'rms_norm_eps': expected a number above 0");
  }
  for (const char* broken : {"{\"a\": NaNa}", "{\"a\": 1NaN}", "{\"a\": Infinit}", "{NaN: 1}", "NaN"})
    EXPECT_FALSE(refusal_message(broken).starts_with("taken")) << broken;
  // Several keys are named in one line.
  Json many = kTiny;
  for (int i = 0; i < 40; ++i) many["k" + std::to_string(i)] = i;
  const Said said = parsed(many.dump());
  ASSERT_EQ(said.notes.size(), 1u);
  EXPECT_TRUE(said.notes[0].ends_with(" and 28 more")) << said.notes[0];
}

// The defaults of LlamaConfig() etc. in transformers 5.0 (src/transformers/models/*/configuration_*.py).
TEST(HubConfig, DefaultsMatchTransformers) {
  const std::map<std::string, std::string> defaults = {
      {"gpt2",
       "gpt2 12 layers, 12/12 heads of 64, 768 channels, 3072 hidden, context 1024, vocab 50257, eps 1e-05, tied"},
      {"llama",
       "llama 32 layers, 32/32 heads of 128, 4096 channels, 11008 hidden, context 2048, vocab 32000, eps 1e-06, "
       "theta 10000"},
      {"mistral",
       "llama 32 layers, 32/8 heads of 128, 4096 channels, 14336 hidden, context 131072, vocab 32000, eps 1e-06, "
       "theta 10000, window 4096"},
      {"mixtral",
       "llama 32 layers, 32/8 heads of 128, 4096 channels, 14336 hidden, context 131072, vocab 32000, eps 1e-05, "
       "theta 1000000, experts 8/2"},
      {"qwen2",
       "llama 32 layers, 32/32 heads of 128, 4096 channels, 22016 hidden, context 32768, vocab 151936, eps 1e-06, "
       "theta 10000, biased"},
      {"qwen3",
       "llama 32 layers, 32/32 heads of 128, 4096 channels, 22016 hidden, context 32768, vocab 151936, eps 1e-06, "
       "theta 10000, normed"},
      {"qwen3_moe",
       "llama 24 layers, 32/4 heads of 64, 2048 channels, 768 hidden, context 32768, vocab 151936, eps 1e-06, "
       "theta 10000, normed, experts 128/8"}};
  for (const auto& [type, message] : defaults) EXPECT_EQ(in_words(parsed(Json{{"model_type", type}}.dump())), message);
  // null differs from a missing key.
  const auto type = [](const char* name) { return Json{{"model_type", name}}; };
  EXPECT_EQ(parsed(with(type("mistral"), "num_key_value_heads", nullptr).dump()).config.key_heads(), 32);
  EXPECT_EQ(parsed(with(type("mistral"), "sliding_window", nullptr).dump()).config.window, 0);
  EXPECT_EQ(parsed(with(type("qwen3"), "head_dim", nullptr).dump()).config.head_size(), 128);
  EXPECT_EQ(parsed(with(type("qwen3_moe"), "intermediate_size", 100).dump()).config.ffn, 768);
}

// In transformers 5.24.0 no model of these types rotates part of a head with default positions, and each fails with
// scaled ones; its Qwen3 and Llama have biases of all four projections, its Mistral and Qwen2 ignore the key.
TEST(HubConfig, PartialRotaryFactorAndBiasesMatchTransformers) {
  const std::string plain = in_words(parsed(kTiny.dump()));
  const Json part = with(kTiny, "partial_rotary_factor", 0.5);
  EXPECT_EQ(in_words(parsed(part.dump())), plain + "; note: partial_rotary_factor");
  EXPECT_EQ(in_words(parsed(with(kTiny, "rope_parameters", {{"partial_rotary_factor", 0.5}}).dump())), plain);
  const Json linear{{"type", "linear"}, {"factor", 2.0}};
  const std::string expected = "'partial_rotary_factor': expected 1 if positions are scaled, got 0.5";
  for (const Json& config :
       {with(part, "rope_scaling", linear), with(kTiny, "rope_scaling", with(linear, "partial_rotary_factor", 0.5))})
    expect_has(refusal_message(config.dump()), expected);
  const auto biases = [](const char* type, const char* key) {
    const std::string found =
        refusal_message(with(with(with(kTiny, "model_type", type), "num_key_value_heads", 2), key, true).dump());
    return found.find(std::string("the key '") + key) != std::string::npos
               ? "refused"
               : found.substr(found.find("theta 10000") + 11);
  };
  EXPECT_EQ(biases("llama", "attention_bias"), ", biased, proj biased");
  EXPECT_EQ(biases("llama", "mlp_bias"), ", mlp biased");
  EXPECT_EQ(biases("qwen3", "attention_bias"), ", biased, proj biased, normed");
  EXPECT_EQ(biases("qwen3_moe", "attention_bias"), ", biased, proj biased, normed, experts 128/8");
  EXPECT_EQ(biases("mistral", "attention_bias"), "refused");
  EXPECT_EQ(biases("qwen3", "mlp_bias"), "refused");
}

// As in transformers 5.24.0: 0 and null count as missing, a length in the object itself takes precedence, as does
// attention_factor over the value derived from mscale.
TEST(HubConfig, YarnKeysMatchTransformers) {
  const auto message = [](const Json& more, const Json& top = Json::object()) {
    Json rope{{"rope_type", "yarn"}, {"factor", 4.0}, {"original_max_position_embeddings", 16}};
    rope.update(more);
    Json config = with(with(kTiny, "max_position_embeddings", 64), "rope_scaling", rope);
    config.update(top);
    const std::string found = refusal_message(config.dump());
    const size_t at = found.find(", yarn ");
    return at == std::string::npos ? found.substr(found.find("the key")) : found.substr(at + 7);
  };
  EXPECT_EQ(message(Json::object()), "4 1 32 16 times 1.1386");
  EXPECT_EQ(message({{"beta_fast", 0}, {"beta_slow", nullptr}, {"mscale", 1.0}}), "4 1 32 16 times 1.1386");
  EXPECT_EQ(message({{"beta_fast", 8}, {"beta_slow", 2.0}, {"truncate", true}}), "4 2 8 16 times 1.1386");
  EXPECT_EQ(message({{"original_max_position_embeddings", nullptr}}), "4 1 32 64 times 1.1386");
  EXPECT_EQ(message(Json::object(), {{"original_max_position_embeddings", 32}}), "4 1 32 32 times 1.1386");
  EXPECT_EQ(message({{"factor", nullptr}}), "4 1 32 16 times 1.1386");  // 64 / 16
  EXPECT_EQ(message({{"mscale", 1.0}, {"mscale_all_dim", 0.5}}), "4 1 32 16 times 1.0648");
  EXPECT_EQ(message({{"mscale", 1.0}, {"mscale_all_dim", 0.5}, {"attention_factor", 1.5}}), "4 1 32 16 times 1.5000");
  EXPECT_EQ(message({{"factor", 0.5}}), "0.5 1 32 16 times 1.0000");
  EXPECT_TRUE(message({{"truncate", false}}).starts_with("the key 'truncate': expected true"));
  EXPECT_TRUE(message({{"beta_slow", 32}}).starts_with("the key 'beta_slow': expected less than beta_fast"));
  EXPECT_TRUE(
      message({{"factor", 1.0}, {"attention_factor", 1.2}}).starts_with("the key 'attention_factor': expected 1"));
}

// A written model is read back as the same model.
TEST(HubConfig, RoundTrips) {
  const ModelConfig gpt2{.layers = 2, .heads = 2, .channels = 16, .context = 32, .vocab = 40, .ffn = 24};
  ModelConfig exact = gpt2, yarn = gpt2;
  exact.gelu = Activation::gelu_erf;
  yarn.family = Family::llama, yarn.kv_heads = 1;
  ModelConfig biases = yarn, slides = yarn, qwen2 = yarn, qwen3 = yarn;
  yarn.rotary = {.scaling = RopeScaling::yarn, .factor = 4, .high_freq_factor = 8, .attention_factor = 1.25};
  biases.qkv_bias = biases.proj_bias = biases.mlp_bias = true;
  slides.window = qwen2.window = qwen3.window = 5;
  qwen2.qkv_bias = qwen3.qk_norm = qwen3.qkv_bias = qwen3.proj_bias = true;
  const std::pair<const char*, ModelConfig> models[] = {{"gpt2", exact},     {"llama", yarn},  {"llama", biases},
                                                        {"mistral", slides}, {"qwen2", qwen2}, {"qwen3", qwen3}};
  for (const auto& [type, config] : models) {
    const std::string written = hub_config(config, DType::float32);
    EXPECT_EQ(Json::parse(written).at("model_type"), type);
    EXPECT_EQ(in_words(parsed(written)), in_words({config, {}})) << written;
    EXPECT_EQ(parsed(written).config.rotary, config.rotary) << written;
  }
  slides.window = 32;  // the full context
  EXPECT_EQ(Json::parse(hub_config(slides, DType::float32)).at("model_type"), "llama");
  biases.window = 5;
  EXPECT_THROW(hub_config(biases, DType::float32), Error);
}

// A window is used if layers slide, and has an effect if it is shorter than the context.
TEST(HubConfig, ReadsWindowOfSlidingLayers) {
  const auto window = [](const char* type, const Json& keys) {
    Json config = with(with(kTiny, "model_type", type), "max_position_embeddings", 64);
    config.update({{"num_hidden_layers", 2}, {"num_key_value_heads", 2}});
    config.update(keys);
    return parsed(config.dump()).config.window;
  };
  EXPECT_EQ(window("mistral", {{"sliding_window", 4096}}), 0);
  EXPECT_EQ(window("mistral", {{"sliding_window", 64}}), 0);
  EXPECT_EQ(window("mistral", {{"sliding_window", 63}}), 63);
  EXPECT_EQ(window("mistral", Json::object()), 0);
  EXPECT_EQ(window("qwen2", {{"sliding_window", 8}}), 0);
  EXPECT_EQ(window("qwen2", {{"sliding_window", 8}, {"use_sliding_window", true}}), 0);  // from layer 28 on
  EXPECT_EQ(window("qwen2", {{"sliding_window", 8}, {"use_sliding_window", true}, {"max_window_layers", 0}}), 8);
  EXPECT_THROW(window("qwen2", {{"sliding_window", 8}, {"use_sliding_window", true}, {"max_window_layers", 1}}),
               InputError);
  EXPECT_EQ(window("qwen2", {{"sliding_window", 64}, {"use_sliding_window", true}, {"max_window_layers", 1}}), 0);
  EXPECT_EQ(window("mixtral", {{"sliding_window", 8}}), 8);
  EXPECT_EQ(window("llama", {{"sliding_window", 8}}), 0);  // its class has no window
  EXPECT_EQ(window("qwen2", {{"sliding_window", "no number"}, {"max_window_layers", -1}}), 0);
  EXPECT_THROW(window("qwen3", {{"sliding_window", 8}, {"layer_types", {"full_attention", "sliding_attention"}}}),
               InputError);
  EXPECT_EQ(window("qwen3", {{"sliding_window", 8}, {"layer_types", {"sliding_attention", "sliding_attention"}}}), 8);
  EXPECT_EQ(window("qwen3", {{"sliding_window", 99}, {"layer_types", {"full_attention", "sliding_attention"}}}), 0);
  EXPECT_EQ(window("qwen3", {{"sliding_window", 8}, {"layer_types", {"full_attention", "full_attention"}}}), 0);
  EXPECT_THROW(window("qwen3", {{"sliding_window", nullptr}, {"layer_types", {"sliding_attention"}}}), InputError);
}

// Every layer of Mixtral and Qwen3-MoE has experts, each with separate tensors.
TEST(HubExperts, TensorNamesAndKeysMatchTransformers) {
  ModelConfig mixtral{.family = Family::llama, .layers = 2, .heads = 2, .channels = 16, .context = 32, .vocab = 40};
  mixtral.kv_heads = 1, mixtral.head_dim = 8, mixtral.ffn = 24, mixtral.tied = false;
  mixtral.experts.count = 3;
  ModelConfig qwen3 = mixtral;
  qwen3.qk_norm = true, qwen3.experts.per_token = 3, qwen3.experts.softmax = RouterSoftmax::all;
  for (const ModelConfig& c : {mixtral, qwen3}) {
    const std::string text = hub_config(c, DType::float32);
    const ModelConfig again = parse_hub_config(text, "config.json");
    EXPECT_EQ(again.experts, c.experts);
    EXPECT_EQ(again.hidden(), c.hidden());
    EXPECT_EQ(again.qk_norm, c.qk_norm);
    std::vector<std::string> names;
    for (const HubTensor& t : hub_tensors(c))
      for (const HubTensor::Slice& p : t.slices) names.push_back(p.name + " " + std::to_string(p.rows));
    const auto has = [&](const std::string& name) { return std::ranges::find(names, name) != names.end(); };
    for (const auto& [qwen3_has, mixtral_has] :
         {std::pair{"1.mlp.gate.weight 3", "1.block_sparse_moe.gate.weight 3"},
          {"0.mlp.experts.2.gate_proj.weight 24", "0.block_sparse_moe.experts.2.w1.weight 24"},
          {"0.mlp.experts.2.up_proj.weight 24", "0.block_sparse_moe.experts.2.w3.weight 24"},
          {"1.mlp.experts.0.down_proj.weight 16", "1.block_sparse_moe.experts.0.w2.weight 16"}})
      EXPECT_TRUE(has(std::string("model.layers.") + (c.qk_norm ? qwen3_has : mixtral_has))) << mixtral_has;
    const auto refused = [&](const char* key, const Json& value) {
      EXPECT_THROW(parse_hub_config(with(Json::parse(text), key, value).dump(), "config.json"), InputError) << key;
    };
    refused("num_experts_per_tok", 4);
    refused(c.qk_norm ? "num_experts" : "num_local_experts", 0);
    refused(c.qk_norm ? "decoder_sparse_step" : "router_jitter_noise", 2);
    ModelConfig other = c;
    other.experts.shared = 1;
    EXPECT_THROW(hub_config(other, DType::float32), Error);
    other = c;
    other.family = Family::gpt2;
    EXPECT_THROW(hub_config(other, DType::float32), Error);
  }
}

}  // namespace
}  // namespace tessera
