// Keys of config.json.
#include "hub/config.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <nlohmann/json.hpp>
#include <optional>
#include <vector>

#include "data/json.h"
#include "hub/config_keys.h"
#include "tensor/error.h"

namespace tessera {
namespace {

using Json = nlohmann::json;

// "rope_scaling" of older files, or "rope_parameters", in which theta may stand too.
void read_rope_object(const Json& json, const std::string& what, ModelConfig& c) {
  if (!json.is_object()) throw InputError(what + ": expected an object");
  ConfigKeys keys(json, what);
  RotaryOptions& r = c.rotary;
  r.theta = keys.number("rope_theta", r.theta);
  const Json* type = keys.find("rope_type");
  const Json* const older = keys.find("type");
  if (!type) type = older;
  if (!type || *type == "default") return keys.end();
  RotaryOptions scaled{.theta = r.theta, .scaling = RopeScaling::linear, .factor = keys.number("factor")};
  if (*type == "llama3") {
    scaled.scaling = RopeScaling::llama3;
    scaled.low_freq_factor = keys.number("low_freq_factor");
    scaled.high_freq_factor = keys.number("high_freq_factor");
    scaled.original_context = keys.size("original_max_position_embeddings");
    if (scaled.low_freq_factor >= scaled.high_freq_factor)
      keys.refuse("low_freq_factor", "less than high_freq_factor", scaled.low_freq_factor);
  } else if (*type != "linear") {
    keys.refuse("rope_type", "default, linear or llama3", *type);
  }
  if (scaled.factor != 1) r = scaled;  // each frequency times 1 stays what it is
  keys.end();
}

ModelConfig gpt2_from(ConfigKeys& keys) {
  ModelConfig c;
  c.layers = keys.size("n_layer"), c.heads = keys.size("n_head"), c.channels = keys.size("n_embd");
  c.context = keys.size("n_positions"), c.vocab = keys.size("vocab_size");
  c.ffn = keys.size("n_inner", 4 * c.channels);
  c.norm_eps = keys.number("layer_norm_epsilon", 1e-5);
  c.tied = keys.flag("tie_word_embeddings", true);
  keys.must_be("activation_function", {"gelu_new", "gelu_pytorch_tanh"});
  keys.must_be("scale_attn_weights", {true});
  for (const char* key : {"scale_attn_by_inverse_layer_idx", "reorder_and_upcast_attn", "add_cross_attention"})
    keys.must_be(key, {false});
  return c;
}

// Of Mixtral and Qwen3-MoE: every layer has experts.
void read_experts(ConfigKeys& keys, const std::string& type, ModelConfig& c) {
  const bool mixtral = type == "mixtral", published = !mixtral && keys.find("num_experts");
  const char* const count = published ? "num_experts" : "num_local_experts";  // transformers writes the second for both
  c.experts.count = keys.size(count);
  c.experts.per_token = keys.size("num_experts_per_tok");
  if (c.experts.per_token > c.experts.count)
    keys.refuse("num_experts_per_tok", fmt::format("at most the {} experts", c.experts.count), c.experts.per_token);
  if (c.experts.count > 10000) keys.refuse(count, "at most 10000", c.experts.count);
  for (const char* key : {"router_aux_loss_coef", "output_router_logits"}) keys.find(key);  // of training
  if (mixtral) return keys.must_be("router_jitter_noise", {0.0});
  c.ffn = keys.size("moe_intermediate_size");
  if (!keys.flag("norm_topk_prob", false)) c.experts.softmax = RouterSoftmax::all;
  keys.must_be("decoder_sparse_step", {1});
  keys.must_be("mlp_only_layers", {Json::array()});
}

ModelConfig llama_from(ConfigKeys& keys, const std::string& type) {
  const bool llama = type == "llama", qwen3 = type.starts_with("qwen3");
  ModelConfig c{.family = Family::llama};
  c.layers = keys.size("num_hidden_layers"), c.heads = keys.size("num_attention_heads");
  c.channels = keys.size("hidden_size"), c.ffn = keys.size("intermediate_size");
  c.context = keys.size("max_position_embeddings"), c.vocab = keys.size("vocab_size");
  // What the transformers library takes where nothing is said differs from family to family: only Llama's is plain.
  c.kv_heads = llama ? keys.size("num_key_value_heads", c.heads) : keys.size("num_key_value_heads");
  c.head_dim = qwen3 ? keys.size("head_dim") : keys.size("head_dim", c.channels / c.heads);
  c.norm_eps = keys.number("rms_norm_eps", 1e-6);
  c.tied = keys.flag("tie_word_embeddings", false);
  c.qkv_bias = type == "qwen2";
  c.qk_norm = qwen3;
  if (type == "mixtral" || type == "qwen3_moe") read_experts(keys, type, c);
  keys.must_be("hidden_act", {"silu"});
  for (const char* key : {"attention_bias", "mlp_bias"}) keys.must_be(key, {false});
  c.rotary.theta = keys.number("rope_theta", c.rotary.theta);
  if (const Json* older = keys.find("rope_scaling")) read_rope_object(*older, keys.what() + ": rope_scaling", c);
  if (const Json* newer = keys.find("rope_parameters")) read_rope_object(*newer, keys.what() + ": rope_parameters", c);
  if (type.starts_with("qwen")) {
    keys.find("sliding_window");
    keys.must_be("use_sliding_window", {false});
  } else if (const Json* window = keys.find("sliding_window")) {
    keys.refuse("sliding_window", "null: every token attends to all before it", *window);
  }
  if (const Json* layers = keys.find("layer_types"))
    if (!layers->is_array() || std::ranges::any_of(*layers, [](const Json& l) { return l != "full_attention"; }))
      keys.refuse("layer_types", "full_attention of every layer", *layers);
  return c;
}

}  // namespace

ModelConfig parse_hub_config(std::string_view text, const std::string& what, std::optional<GptqConfig>* gptq) {
  const Json json = parse_json(text, what);
  if (!json.is_object()) throw InputError(what + ": expected an object");
  ConfigKeys keys(json, what);
  const Json* const found = keys.find("model_type");
  constexpr std::array<std::string_view, 7> types{"gpt2", "llama", "mistral", "qwen2", "qwen3", "mixtral", "qwen3_moe"};
  if (!found || std::ranges::find(types, *found) == types.end())
    keys.refuse("model_type", "gpt2, llama, mistral, qwen2, qwen3, mixtral or qwen3_moe", found ? *found : Json());
  const std::string type = found->get<std::string>();
  // Left out, Mistral's window is one of 4096 tokens.
  if (type == "mistral" && !json.contains("sliding_window"))
    keys.refuse("sliding_window", "null: every token attends to all before it", "none, which means 4096");
  ModelConfig c = type == "gpt2" ? gpt2_from(keys) : llama_from(keys, type);
  if (const Json* const quantised = gptq ? keys.find("quantization_config") : nullptr)
    *gptq = parse_gptq_config(quantised->dump(), what + ": quantization_config");
  keys.end();
  if (c.channels % c.heads != 0 && !json.contains("head_dim"))
    keys.refuse(type == "gpt2" ? "n_head" : "num_attention_heads", "a divisor of the channels", c.heads);
  if (c.heads % c.all_heads().key != 0) keys.refuse("num_key_value_heads", "a divisor of the heads", c.kv_heads);
  if (type != "gpt2" && c.head_dim % 2 != 0) keys.refuse("head_dim", "an even number", c.head_dim);
  constexpr int64_t kMost = int64_t{1} << 60;  // of any product of two sizes
  for (const int64_t rows : {c.vocab, c.context, 2 * c.hidden(), 3 * c.attended()})
    if (rows > kMost / c.channels)
      throw InputError(fmt::format("{}: a tensor of {} x {} elements; no memory has so many", what, rows, c.channels));
  if (c.layers > 100000) keys.refuse(type == "gpt2" ? "n_layer" : "num_hidden_layers", "at most 100000", c.layers);
  return c;
}

namespace {

nlohmann::ordered_json expert_keys(const ModelConfig& c) {
  if (c.experts.shared > 0) throw Error("the hub's mixtral and qwen3_moe have no shared experts");
  if (!c.qk_norm && c.experts.softmax == RouterSoftmax::all)
    throw Error("the hub's mixtral has weights that are shares among the chosen experts, not among all");
  if (!c.qk_norm)
    return {{"num_local_experts", c.experts.count},
            {"num_experts_per_tok", c.experts.per_token},
            {"sliding_window", nullptr}};
  return {{"num_experts", c.experts.count},
          {"num_experts_per_tok", c.experts.per_token},
          {"moe_intermediate_size", c.hidden()},
          {"norm_topk_prob", c.experts.softmax == RouterSoftmax::chosen},
          {"decoder_sparse_step", 1},
          {"mlp_only_layers", Json::array()}};
}

}  // namespace

std::string hub_config(const ModelConfig& c, DType dtype, const GptqConfig* gptq) {
  nlohmann::ordered_json out;
  const std::string stored(name_of(dtype));
  const bool experts = c.experts.count > 0;
  if (experts && (c.family == Family::gpt2 || c.qkv_bias))
    throw Error("the hub has experts in mixtral and qwen3_moe, which are of the family llama and have no biases");
  if (c.family == Family::gpt2) {
    if (c.all_heads().key != c.heads || c.head_size() * c.heads != c.channels)
      throw Error(fmt::format("the hub has no gpt2 with {} heads of keys of {} numbers beside {} heads and {} channels",
                              c.all_heads().key, c.head_size(), c.heads, c.channels));
    out = {{"architectures", {"GPT2LMHeadModel"}},
           {"model_type", "gpt2"},
           {"activation_function", "gelu_new"},
           {"n_layer", c.layers},
           {"n_head", c.heads},
           {"n_embd", c.channels},
           {"n_inner", c.hidden()},
           {"n_positions", c.context},
           {"vocab_size", c.vocab},
           {"layer_norm_epsilon", c.norm_eps}};
  } else {
    if (c.qkv_bias && c.qk_norm)
      throw Error("the hub has no family with both biases of q, k and v and norms of q and k");
    if (c.qkv_bias && c.head_size() * c.heads != c.channels)
      throw Error("the hub's qwen2 has no heads of another size than channels / heads");
    std::string family = c.qk_norm    ? "Qwen3"
                         : c.qkv_bias ? "Qwen2"
                                      : "Llama",
                type = c.qk_norm    ? "qwen3"
                       : c.qkv_bias ? "qwen2"
                                    : "llama";
    if (experts) family = c.qk_norm ? "Qwen3Moe" : "Mixtral", type = c.qk_norm ? "qwen3_moe" : "mixtral";
    out = {{"architectures", {family + "ForCausalLM"}},
           {"model_type", type},
           {"hidden_act", "silu"},
           {"num_hidden_layers", c.layers},
           {"num_attention_heads", c.heads},
           {"num_key_value_heads", c.all_heads().key},
           {"hidden_size", c.channels},
           {"intermediate_size", c.hidden()},
           {"max_position_embeddings", c.context},
           {"vocab_size", c.vocab},
           {"rms_norm_eps", c.norm_eps},
           {"rope_theta", c.rotary.theta}};
    if (!c.qkv_bias) out["head_dim"] = c.head_size();
    if (experts) out.update(expert_keys(c));
    nlohmann::ordered_json rope = {{"rope_type", "default"}, {"rope_theta", c.rotary.theta}};
    if (c.rotary.scaling != RopeScaling::none) {
      rope["rope_type"] = c.rotary.scaling == RopeScaling::linear ? "linear" : "llama3";
      rope["factor"] = c.rotary.factor;
      if (c.rotary.scaling == RopeScaling::llama3) {
        rope["low_freq_factor"] = c.rotary.low_freq_factor;
        rope["high_freq_factor"] = c.rotary.high_freq_factor;
        rope["original_max_position_embeddings"] = c.rotary.original_context;
      }
      out["rope_scaling"] = rope;
    }
    out["rope_parameters"] = rope;
  }
  out["tie_word_embeddings"] = c.tied;
  out["torch_dtype"] = stored;
  out["dtype"] = stored;
  if (gptq) out["quantization_config"] = nlohmann::ordered_json::parse(gptq_config(*gptq));
  return out.dump(2) + "\n";
}

}  // namespace tessera
