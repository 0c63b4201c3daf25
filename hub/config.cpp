// The table of model types and their keys, and config.json by it.
#include "hub/config.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <initializer_list>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <type_traits>
#include <variant>
#include <vector>

#include "base/bad_input.h"
#include "base/error.h"
#include "base/json.h"
#include "hub/keys.h"
#include "models/families.h"

namespace tessera {
namespace {

using Json = nlohmann::json;

// Common keys without effect on the computation, and keys that repeat others.
constexpr std::string_view kIgnoredKeys =
    "_name_or_path architectures transformers_version torch_dtype dtype bos_token_id eos_token_id pad_token_id "
    "unk_token_id initializer_range attention_dropout resid_pdrop embd_pdrop attn_pdrop gradient_checkpointing "
    "pretraining_tp router_aux_loss_coef output_router_logits summary_type summary_use_proj summary_activation "
    "summary_first_dropout summary_proj_to_labels problem_type task_specific_params finetuning_task id2label "
    "label2id use_cache return_dict output_hidden_states output_attentions chunk_size_feed_forward "
    "_attn_implementation attn_implementation reorder_and_upcast_attn n_ctx max_window_layers rope_type "
    "original_max_position_embeddings";

// Keys by which transformers, or custom model code, enables computations that Tessera does not support.
const std::vector<RestrictedKeys>& restricted_keys() {
  static const std::vector<RestrictedKeys> all{
      {"attention_bias", {false}, "", "mistral mixtral"},
      {"mlp_bias", {false}, "", "gpt2 mistral mixtral qwen2 qwen3 qwen3_moe"},
      {"scale_attn_weights", {true}},
      {"scale_attn_by_inverse_layer_idx add_cross_attention is_encoder_decoder use_mrope qk_layernorm use_qk_norm "
       "alibi "
       "use_parallel_residual",
       {false}},
      {"rotary_pct", {1}, " (rotation of the full head)"},
      {"embedding_multiplier residual_multiplier logits_scaling logit_scale decoder_sparse_step", {1}},
      {"router_jitter_noise", {0}},
      {"mlp_only_layers", {Json::array()}},
      {"quantization", {}, " (MLX's: mlx_lm.convert --dequantize converts it to a supported model)"},
      {"pruned_heads attn_logit_softcapping final_logit_softcapping query_pre_attn_scalar attention_multiplier "
       "clip_qkv shared_expert_intermediate_size n_shared_experts compression_config"}};
  return all;
}

constexpr int64_t kMaxLayers = 100000, kMaxExperts = 10000;

using Model = ModelConfig;
using KeyField = std::variant<std::monostate, int64_t Model::*, double Model::*, bool Model::*, Activation Model::*,
                              int64_t ExpertConfig::*, RouterSoftmax ExpertConfig::*, double RotaryOptions::*>;

struct Key {
  std::string_view name;
  KeyField field = {};
  // Derives the size from preceding keys if the value is null, or missing without a default.
  int64_t (Model::*follows)() const = nullptr;
  int64_t max = int64_t{1} << 40;
  std::vector<Json> values = {};
  std::string_view also = {};  // an alias, read if the name is missing
};
using KeyList = std::vector<Key>;

// Defaults of the classes of transformers 5.0 (LlamaConfig etc., src/transformers/models/*/configuration_*.py),
// identical to those of 4.57. 0: derived from other keys, or none.
struct Defaults {
  std::string_view type;
  int64_t layers, heads, kv_heads, head_dim, channels, ffn, context, vocab;
  double norm_eps, theta;
  int64_t window, experts, per_token;
};
constexpr Defaults kDefaults[] = {{"gpt2", 12, 12, 0, 0, 768, 0, 1024, 50257, 1e-5, 1e4, 0, 0, 0},
                                  {"llama", 32, 32, 0, 0, 4096, 11008, 2048, 32000, 1e-6, 1e4, 0, 0, 0},
                                  {"mistral", 32, 32, 8, 0, 4096, 14336, 131072, 32000, 1e-6, 1e4, 4096, 0, 0},
                                  {"qwen2", 32, 32, 32, 0, 4096, 22016, 32768, 151936, 1e-6, 1e4, 4096, 0, 0},
                                  {"qwen3", 32, 32, 32, 128, 4096, 22016, 32768, 151936, 1e-6, 1e4, 4096, 0, 0},
                                  {"mixtral", 32, 32, 8, 0, 4096, 14336, 131072, 32000, 1e-5, 1e6, 0, 8, 2},
                                  {"qwen3_moe", 24, 32, 4, 0, 2048, 768, 32768, 151936, 1e-6, 1e4, 4096, 128, 8}};

struct HubType {
  std::string_view name, architecture;
  ModelConfig base;   // fixed properties of the type, and defaults
  KeyList written;    // in this order
  KeyList read = {};  // never written
  bool experts = false;
  bool may_slide = false;  // a window is used only if "use_sliding_window" is set
};

Key restricted(std::string_view name, std::vector<Json> values) { return {.name = name, .values = std::move(values)}; }

// Names of an activation in files; the first one is written.
struct ActivationNames {
  Activation kind;
  std::vector<std::string_view> names;
};
const std::vector<ActivationNames>& activations() {
  static const std::vector<ActivationNames> all{
      {Activation::gelu, {"gelu_new", "gelu_pytorch_tanh", "gelu_fast", "gelu_accurate", "gelu_python_tanh"}},
      {Activation::gelu_erf, {"gelu", "gelu_python"}},
      {Activation::silu, {"silu", "swish"}}};
  return all;
}

std::vector<Json> activation_names(std::initializer_list<Activation> kinds) {
  std::vector<Json> out;
  for (const auto& [kind, names] : activations())
    if (std::ranges::count(kinds, kind) > 0) out.insert(out.end(), names.begin(), names.end());
  return out;
}

KeyList llama_keys(const KeyList& more) {
  KeyList keys{restricted("hidden_act", activation_names({Activation::silu})),
               {"num_hidden_layers", &Model::layers, nullptr, kMaxLayers},
               {"num_attention_heads", &Model::heads},
               {"num_key_value_heads", &Model::kv_heads, &Model::key_heads},
               {"hidden_size", &Model::channels},
               {"intermediate_size", &Model::ffn},
               {"max_position_embeddings", &Model::context},
               {"vocab_size", &Model::vocab},
               {"rms_norm_eps", &Model::norm_eps},
               {"rope_theta", &RotaryOptions::theta}};
  keys.insert(keys.end(), more.begin(), more.end());
  return keys;
}

std::vector<HubType> make_types() {
  const Key attention_bias{"attention_bias", &Model::proj_bias}, mlp_bias{"mlp_bias", &Model::mlp_bias};
  const Key head_dim{"head_dim", &Model::head_dim, &Model::head_size};
  const ModelConfig like_llama{.family = Family::llama, .tied = false};
  ModelConfig like_qwen2 = like_llama, like_qwen3 = like_llama, like_qwen3_moe = like_llama;
  like_qwen2.qkv_bias = true;
  like_qwen3.qk_norm = like_qwen3_moe.qk_norm = true;
  like_qwen3_moe.experts.softmax = RouterSoftmax::all;
  std::vector<HubType> all{
      {"gpt2",
       "GPT2LMHeadModel",
       {},
       {{.name = "activation_function",
         .field = &Model::gelu,
         .values = activation_names({Activation::gelu, Activation::gelu_erf})},
        {"n_layer", &Model::layers, nullptr, kMaxLayers},
        {"n_head", &Model::heads},
        {"n_embd", &Model::channels},
        {"n_inner", &Model::ffn, &Model::hidden},
        {"n_positions", &Model::context},
        {"vocab_size", &Model::vocab},
        {"layer_norm_epsilon", &Model::norm_eps}}},
      {"llama", "LlamaForCausalLM", like_llama, llama_keys({head_dim, attention_bias, mlp_bias})},
      {"mistral", "MistralForCausalLM", like_llama, llama_keys({head_dim})},
      {.name = "qwen2",
       .architecture = "Qwen2ForCausalLM",
       .base = like_qwen2,
       .written = llama_keys({}),
       .read = {head_dim},
       .may_slide = true},
      {.name = "qwen3",
       .architecture = "Qwen3ForCausalLM",
       .base = like_qwen3,
       .written = llama_keys({head_dim, attention_bias}),
       .may_slide = true},
      {"mixtral",
       "MixtralForCausalLM",
       like_llama,
       llama_keys({head_dim,
                   {"num_local_experts", &ExpertConfig::count, nullptr, kMaxExperts},
                   {"num_experts_per_tok", &ExpertConfig::per_token},
                   restricted("sliding_window", {nullptr})}),
       {},
       true},
      {"qwen3_moe",
       "Qwen3MoeForCausalLM",
       like_qwen3_moe,
       llama_keys(
           {head_dim,
            {.name = "num_experts", .field = &ExpertConfig::count, .max = kMaxExperts, .also = "num_local_experts"},
            {"num_experts_per_tok", &ExpertConfig::per_token},
            {"moe_intermediate_size", &Model::ffn},
            {"norm_topk_prob", &ExpertConfig::softmax},
            attention_bias,
            restricted("decoder_sparse_step", {1}),
            restricted("mlp_only_layers", {Json::array()})}),
       {},
       true,
       true}};
  for (HubType& type : all) {
    const Defaults& u = *std::ranges::find(kDefaults, type.name, &Defaults::type);
    ModelConfig& c = type.base;
    c.layers = u.layers, c.heads = u.heads, c.kv_heads = u.kv_heads, c.head_dim = u.head_dim, c.channels = u.channels;
    c.ffn = u.ffn, c.context = u.context, c.vocab = u.vocab, c.norm_eps = u.norm_eps, c.rotary.theta = u.theta;
    c.window = u.window, c.experts.count = u.experts;
    if (u.experts > 0) c.experts.per_token = u.per_token;
  }
  return all;
}

const std::vector<HubType>& types() {
  static const std::vector<HubType> all = make_types();
  return all;
}

bool slides(const ModelConfig& c) { return c.window > 0 && c.window < c.context; }

// The first type that supports all properties of the model, or null.
const HubType* hub_type(const ModelConfig& c) {
  const auto found = std::ranges::find_if(types(), [&](const HubType& t) {
    const auto has_key = [&](std::string_view key) { return std::ranges::count(t.written, key, &Key::name) > 0; };
    const bool biases = c.proj_bias ? c.qkv_bias && has_key("attention_bias") : c.qkv_bias == t.base.qkv_bias;
    return t.base.family == c.family && biases && (!c.mlp_bias || has_key("mlp_bias")) && t.base.qk_norm == c.qk_norm &&
           t.experts == (c.experts.count > 0) && (!slides(c) || t.name != "llama");
  });
  return found == types().end() ? nullptr : &*found;
}

void read(HubKeys& keys, const Key& key, ModelConfig& c, int64_t& to) {
  const std::string_view name = key.also.empty() || keys.find(key.name) ? key.name : key.also;
  const bool is_null = keys.has(name) && !keys.find(name);
  if (key.follows && (is_null || to == 0)) {
    to = 0;
    to = (c.*key.follows)();
  }
  to = keys.size(name, to, key.max);
}
void read(HubKeys& keys, const Key& key, ModelConfig&, double& to) { to = keys.number(key.name, to); }
void read(HubKeys& keys, const Key& key, ModelConfig&, bool& to) { to = keys.flag(key.name, to); }
void read(HubKeys& keys, const Key& key, ModelConfig&, Activation& to) {
  const std::string found = keys.text(key.name, "");  // checked afterwards
  for (const auto& [kind, names] : activations())
    if (std::ranges::count(names, found) > 0) to = kind;
}
void read(HubKeys& keys, const Key& key, ModelConfig&, RouterSoftmax& to) {
  to = keys.flag(key.name, to == RouterSoftmax::chosen) ? RouterSoftmax::chosen : RouterSoftmax::all;
}

// Calls f with an accessor of the config field of the key, if there is one.
template <class F>
void with_field(const Key& key, const F& f) {
  std::visit(
      [&]<class To>(To to) {
        if constexpr (std::is_invocable_v<To, ModelConfig&>)
          f([to](ModelConfig & c) -> auto& { return c.*to; });
        else if constexpr (std::is_invocable_v<To, ExpertConfig&>)
          f([to](ModelConfig & c) -> auto& { return c.experts.*to; });
        else if constexpr (std::is_invocable_v<To, RotaryOptions&>)
          f([to](ModelConfig & c) -> auto& { return c.rotary.*to; });
      },
      key.field);
}

// "rope_scaling" of older files, or "rope_parameters", which may also contain theta; other keys belong to unsupported
// types. Defaults follow transformers 5.24 (src/transformers/modeling_rope_utils.py), where models of all supported
// types rotate full heads if positions are not scaled, whatever the file specifies.
void read_rope_object(HubKeys& top, const std::string& key, const std::string& what, ModelConfig& c) {
  HubKeys keys(*top.find(key), what + ": " + key);
  RotaryOptions& r = c.rotary;
  r.theta = keys.number("rope_theta", r.theta);
  keys.check(restricted_keys());
  for (const auto& [inner, value] : top.find(key)->items())
    if (value.is_object()) keys.refuse(inner, "the same rotary parameters in all layers", value);
  const std::string type = keys.text("rope_type", keys.text("type", "default"));
  if (type == "default") return;
  if (std::ranges::find(kRopeScalingNames, type) == kRopeScalingNames.end() || type == "none")
    keys.refuse("rope_type", "default, linear, llama3 or yarn", type);
  const bool yarn = type == "yarn";
  static const RestrictedKeys partial{"partial_rotary_factor", {1}, " if positions are scaled"},
      rounded{"truncate", {true}, " (positions are integers)"};
  for (HubKeys* const object : {&top, &keys}) object->check({&partial, 1});
  if (yarn) keys.check({&rounded, 1});
  RotaryOptions scaled{.theta = r.theta, .scaling = RopeScaling::linear};
  if (type != "linear")
    scaled.original_context =
        (top.find("original_max_position_embeddings") ? top : keys).size("original_max_position_embeddings", c.context);
  const double grown = static_cast<double>(c.context) / static_cast<double>(scaled.original_context);
  scaled.factor = yarn ? keys.number("factor", grown) : keys.number("factor");
  const char *low = "low_freq_factor", *high = "high_freq_factor";
  if (yarn) {
    const auto number = [&](const char* name, double default_value) {  // 0 counts as missing
      const double found = keys.number(name, default_value, 0);
      return found > 0 ? found : default_value;
    };
    const auto scale = [&](double times) { return scaled.factor > 1 ? 0.1 * times * std::log(scaled.factor) + 1 : 1; };
    low = "beta_slow", high = "beta_fast";
    scaled.scaling = RopeScaling::yarn;
    scaled.low_freq_factor = number(low, 1), scaled.high_freq_factor = number(high, 32);
    const double one = number("mscale", 0), other = number("mscale_all_dim", 0);
    scaled.attention_factor =
        keys.number("attention_factor", one > 0 && other > 0 ? scale(one) / scale(other) : scale(1));
    if (scaled.factor == 1 && scaled.attention_factor != 1)
      keys.refuse("attention_factor", "1 for factor 1", scaled.attention_factor);
  } else if (type == "llama3") {
    scaled.scaling = RopeScaling::llama3;
    scaled.low_freq_factor = keys.number(low), scaled.high_freq_factor = keys.number(high);
  }
  if (type != "linear" && scaled.low_freq_factor >= scaled.high_freq_factor)
    keys.refuse(low, fmt::format("less than {}", high), scaled.low_freq_factor);
  if (scaled.factor != 1) r = scaled;  // factor 1 scales nothing
}

// The sliding window matters if it is shorter than the context: in all layers of Mistral, in the layers that Qwen's
// keys select, never in Llama. The size is validated only if a layer slides, and then all layers must slide.
void read_window(HubKeys& keys, const HubType& type, ModelConfig& c) {
  const Json *const layers = keys.find("layer_types"), *const first = keys.find("max_window_layers");
  const auto count = [&](const char* kind) { return layers ? std::count(layers->begin(), layers->end(), kind) : 0; };
  const int64_t sliding = count("sliding_attention"), before = first ? natural(*first).value_or(0) : 28;
  if (layers && sliding + count("full_attention") != std::ssize(*layers))
    keys.refuse("layer_types", "full_attention in every layer", *layers);
  if (type.name == "llama") return;
  const bool may_slide = keys.flag("use_sliding_window", false), has_window = keys.has("sliding_window");
  const bool some = !type.may_slide || (layers ? sliding > 0 : may_slide && before < c.layers);
  const bool all = !type.may_slide || (layers ? sliding == std::ssize(*layers) : before == 0);
  const Json* const size = keys.find("sliding_window");
  if (some) c.window = size ? keys.size("sliding_window") : has_window ? 0 : type.base.window;
  if (sliding > 0 && c.window == 0) keys.refuse("layer_types", "full_attention in every layer", *layers);
  if (!slides(c)) c.window = 0;
  const char* const key = layers ? "layer_types" : "max_window_layers";
  if (c.window > 0 && !all) keys.refuse(key, "the same attention type in all layers", layers ? *layers : Json(before));
}

void check_hub_sizes(const HubKeys& keys, const std::string& what, const ModelConfig& c, bool has_head_dim) {
  const bool gpt2 = c.family == Family::gpt2;
  if (c.channels % c.heads != 0 && !has_head_dim)
    keys.refuse(gpt2 ? "n_head" : "num_attention_heads", "a divisor of the number of channels", c.heads);
  if (c.heads % c.key_heads() != 0)
    keys.refuse("num_key_value_heads", "a divisor of the number of attention heads", c.kv_heads);
  if (find_row(c.family).rotary && c.head_dim % 2 != 0) keys.refuse("head_dim", "an even number", c.head_dim);
  constexpr int64_t kMax = int64_t{1} << 60;  // bounds any product of two sizes
  for (const int64_t rows : {c.vocab, c.context, 2 * c.hidden(), 3 * c.attended()})
    if (rows > kMax / c.channels)
      bad_input("{}: a tensor of {} x {} elements does not fit in any memory", what, rows, c.channels);
  if (c.experts.count > 0 && c.experts.per_token > c.experts.count)
    keys.refuse("num_experts_per_tok", fmt::format("at most the {} experts", c.experts.count), c.experts.per_token);
}

}  // namespace

ModelConfig parse_hub_config(std::string_view text, const std::string& what, std::optional<GptqConfig>* gptq,
                             std::vector<std::string>* notes) {
  HubKeys keys(text, what);
  const Json* const found = keys.find("model_type");
  const auto type = std::ranges::find_if(types(), [&](const HubType& t) { return found && *found == t.name; });
  if (type == types().end()) {
    std::vector<std::string_view> names;
    for (const HubType& t : types()) names.push_back(t.name);
    keys.refuse("model_type", alternatives(names), found ? *found : Json());
  }
  ModelConfig c = type->base, base = c;
  c.window = 0;
  const bool rotary = find_row(c.family).rotary;
  for (const KeyList* list : {&type->written, &type->read})
    for (const Key& key : *list) {
      with_field(key, [&](const auto& field_in) { read(keys, key, c, field_in(c) = field_in(base)); });
      const Json* const value = keys.find(key.name);
      if (value && !key.values.empty() && key.values[0] != nullptr &&
          std::ranges::find(key.values, *value) == key.values.end())
        keys.refuse(key.name, key.values[0].dump(), *value);
    }
  c.qkv_bias = c.qkv_bias || c.proj_bias;  // "attention_bias" applies to all four projections
  c.tied = keys.flag("tie_word_embeddings", c.tied);
  keys.check(restricted_keys(), type->name);
  if (rotary) {
    for (const char* key : {"rope_scaling", "rope_parameters"})
      if (keys.find(key)) read_rope_object(keys, key, what, c);
    read_window(keys, *type, c);
  }
  if (const Json* const quantised = keys.find("quantization_config")) {
    if (!gptq) keys.refuse("quantization_config", "none", *quantised);
    HubKeys quantization(*quantised, what + ": quantization_config");
    *gptq = parse_gptq_config(quantization, true, notes);
  }
  if (const std::string unread = keys.unread(kIgnoredKeys); notes && !unread.empty()) notes->push_back(unread);
  check_hub_sizes(keys, what, c, type->base.head_dim > 0 || (rotary && keys.find("head_dim")));
  return c;
}

namespace {

// Empty if a hub type fits the model.
std::string missing_type(const ModelConfig& c) {
  const bool gpt2 = c.family == Family::gpt2, experts = c.experts.count > 0;
  const bool own_heads = c.head_size() * c.heads != c.channels;
  if (experts && (gpt2 || (c.qkv_bias && !c.qk_norm)))
    return "Hugging Face supports experts only in mixtral and qwen3_moe, which belong to the llama family and have no "
           "biases";
  if (gpt2 && (c.key_heads() != c.heads || own_heads))
    return fmt::format(
        "Hugging Face has no gpt2 model with {} key-value heads of {} elements for {} heads and {} channels",
        c.key_heads(), c.head_size(), c.heads, c.channels);
  if (c.proj_bias && !c.qkv_bias)
    return "Hugging Face has no family with a bias in the attention output but none in q, k and v";
  if (c.qkv_bias && c.qk_norm && !c.proj_bias)
    return "Hugging Face's qwen3 supports biases of q, k and v only together with one of the attention output";
  if (c.mlp_bias && (c.qk_norm || c.qkv_bias != c.proj_bias || slides(c)))
    return "Hugging Face supports feed-forward biases only in llama, which has no QK norm, no sliding window, and "
           "biases in all four attention projections or in none";
  if (c.qkv_bias && !c.proj_bias && own_heads)
    return "Hugging Face's qwen2 supports only heads of size channels / heads";
  if (experts && c.experts.shared > 0) return "Hugging Face's mixtral and qwen3_moe have no shared experts";
  if (experts && !c.qk_norm && c.experts.softmax == RouterSoftmax::all)
    return "Hugging Face's mixtral normalizes the routing weights over the selected experts, not over all experts";
  return hub_type(c) ? "" : "Hugging Face has no model type with these components";
}

Json read_value(int64_t value) { return value; }
Json read_value(double value) { return value; }
Json read_value(bool value) { return value; }
Json read_value(Activation value) { return activation_names({value}).at(0); }
Json read_value(RouterSoftmax value) { return value == RouterSoftmax::chosen; }

nlohmann::ordered_json rope_object(const RotaryOptions& r) {
  nlohmann::ordered_json rope = {{"rope_type", "default"}, {"rope_theta", r.theta}};
  if (r.scaling == RopeScaling::none) return rope;
  const bool yarn = r.scaling == RopeScaling::yarn;
  rope["rope_type"] = value_name(r.scaling);
  rope["factor"] = r.factor;
  if (r.scaling == RopeScaling::linear) return rope;
  rope[yarn ? "beta_slow" : "low_freq_factor"] = r.low_freq_factor;
  rope[yarn ? "beta_fast" : "high_freq_factor"] = r.high_freq_factor;
  if (yarn) rope["attention_factor"] = r.attention_factor;
  rope["original_max_position_embeddings"] = r.original_context;
  return rope;
}

}  // namespace

std::string hub_config(const ModelConfig& config, DType dtype, const GptqConfig* gptq) {
  if (const std::string missing = missing_type(config); !missing.empty()) throw Error(missing);
  const HubType& type = *hub_type(config);
  ModelConfig c = config;
  c.kv_heads = c.key_heads(), c.ffn = c.hidden(), c.head_dim = c.head_size();
  if (!find_row(c.family).rotary) c.context = c.position_rows();
  nlohmann::ordered_json out{{"architectures", {type.architecture}}, {"model_type", type.name}};
  for (const Key& key : type.written) {
    if (!key.values.empty()) out[std::string(key.name)] = key.values[0];
    with_field(key, [&](const auto& field_in) { out[std::string(key.name)] = read_value(field_in(c)); });
  }
  if (c.family == Family::gpt2) out["n_ctx"] = c.context;  // required by llama.cpp
  if (find_row(c.family).rotary) {
    const nlohmann::ordered_json rope = rope_object(c.rotary);
    if (c.rotary.scaling != RopeScaling::none) out["rope_scaling"] = rope;
    out["rope_parameters"] = rope;
  }
  if (slides(c)) out["sliding_window"] = c.window;
  if (slides(c) && type.may_slide) out["use_sliding_window"] = true, out["max_window_layers"] = 0;
  out["tie_word_embeddings"] = c.tied;
  for (const char* key : {"torch_dtype", "dtype"}) out[key] = to_string(dtype);
  if (gptq) out["quantization_config"] = nlohmann::ordered_json::parse(gptq_config(*gptq));
  return out.dump(2) + "\n";
}

}  // namespace tessera
