// Keys of config.json.
#include "hub/config.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <vector>

#include "data/json.h"
#include "tensor/error.h"

namespace tessera {
namespace {

using Json = nlohmann::json;

// About training, generation and the file: no layer computes another thing for them.
const std::set<std::string>& without_effect() {
  static const std::set<std::string> keys{"_name_or_path",
                                          "architectures",
                                          "transformers_version",
                                          "torch_dtype",
                                          "dtype",
                                          "use_cache",
                                          "initializer_range",
                                          "bos_token_id",
                                          "eos_token_id",
                                          "pad_token_id",
                                          "unk_token_id",
                                          "attention_dropout",
                                          "resid_pdrop",
                                          "embd_pdrop",
                                          "attn_pdrop",
                                          "n_ctx",
                                          "summary_type",
                                          "summary_use_proj",
                                          "summary_activation",
                                          "summary_first_dropout",
                                          "problem_type",
                                          "summary_proj_to_labels",
                                          "task_specific_params",
                                          "gradient_checkpointing",
                                          "pretraining_tp",
                                          "id2label",
                                          "label2id",
                                          "return_dict",
                                          "output_hidden_states",
                                          "output_attentions",
                                          "is_encoder_decoder",
                                          "chunk_size_feed_forward",
                                          "max_window_layers",
                                          "_attn_implementation",
                                          "attn_implementation",
                                          "auto_map",
                                          "finetuning_task",
                                          "rope_type",
                                          "original_max_position_embeddings"};
  return keys;
}

class Keys {
 public:
  Keys(const Json& json, const std::string& what) : json_(json), what_(what) {}

  [[noreturn]] void refuse(const std::string& key, const std::string& expected, const Json& found) const {
    std::string text = found.dump(-1, ' ', true, Json::error_handler_t::replace);
    if (text.size() > 60) text = text.substr(0, 60) + "...";
    throw InputError(fmt::format("{}: the key '{}': expected {}, found {}", what_, key, expected, text));
  }
  // null counts as a key that is not there.
  const Json* find(const std::string& key) {
    known_.insert(key);
    const auto found = json_.find(key);
    return found == json_.end() || found->is_null() ? nullptr : &*found;
  }
  int64_t size(const std::string& key, std::optional<int64_t> usual = {}) {
    const Json* const found = find(key);
    if (!found && usual) return *usual;
    const std::optional<int64_t> value = found ? natural(*found) : std::nullopt;
    if (!value || *value < 1 || *value > int64_t{1} << 40) refuse(key, "a size", found ? *found : Json());
    return *value;
  }
  double number(const std::string& key, std::optional<double> usual = {}) {
    const Json* const found = find(key);
    if (!found && usual) return *usual;
    if (!found || !found->is_number() || !(found->get<double>() > 0) || found->get<double>() > 1e12)
      refuse(key, "a number above 0", found ? *found : Json());
    return found->get<double>();
  }
  bool flag(const std::string& key, bool usual) {
    const Json* const found = find(key);
    if (!found) return usual;
    if (!found->is_boolean()) refuse(key, "true or false", *found);
    return found->get<bool>();
  }
  // Where a key is there, it must have one of these values.
  void must_be(const std::string& key, const std::vector<Json>& values) {
    const Json* const found = find(key);
    if (found && std::ranges::find(values, *found) == values.end()) refuse(key, values[0].dump(), *found);
  }
  void end() const {
    for (const auto& [key, value] : json_.items())
      if (!known_.contains(key) && !without_effect().contains(key) && !value.is_null())
        throw InputError(fmt::format("{}: the key '{}' is not known; Tessera may not compute what it asks for", what_,
                                     key.substr(0, 60)));
  }
  const std::string& what() const { return what_; }

 private:
  const Json& json_;
  const std::string& what_;
  std::set<std::string> known_;
};

// "rope_scaling" of older files, or "rope_parameters", in which theta may stand too.
void read_rope_object(const Json& json, const std::string& what, ModelConfig& c) {
  if (!json.is_object()) throw InputError(what + ": expected an object");
  Keys keys(json, what);
  RotaryOptions& r = c.rotary;
  r.theta = keys.number("rope_theta", r.theta);
  const Json* type = keys.find("rope_type");
  const Json* const older = keys.find("type");
  if (!type) type = older;
  if (!type || *type == "default") return keys.end();
  r.factor = keys.number("factor");
  if (*type == "linear") {
    r.scaling = RopeScaling::linear;
    return keys.end();
  }
  if (*type != "llama3") keys.refuse("rope_type", "default, linear or llama3", *type);
  r.scaling = RopeScaling::llama3;
  r.low_freq_factor = keys.number("low_freq_factor");
  r.high_freq_factor = keys.number("high_freq_factor");
  r.original_context = keys.size("original_max_position_embeddings");
  keys.end();
}

ModelConfig gpt2_from(Keys& keys) {
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

ModelConfig llama_from(Keys& keys, const std::string& type) {
  const bool llama = type == "llama", qwen3 = type == "qwen3";
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
  Keys keys(json, what);
  const Json* const found = keys.find("model_type");
  constexpr std::array<std::string_view, 5> types{"gpt2", "llama", "mistral", "qwen2", "qwen3"};
  if (!found || std::ranges::find(types, *found) == types.end())
    keys.refuse("model_type", "gpt2, llama, mistral, qwen2 or qwen3", found ? *found : Json());
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

std::string hub_config(const ModelConfig& c, DType dtype, const GptqConfig* gptq) {
  nlohmann::ordered_json out;
  const std::string stored(name_of(dtype));
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
    const std::string family = c.qk_norm    ? "Qwen3"
                               : c.qkv_bias ? "Qwen2"
                                            : "Llama",
                      type = c.qk_norm    ? "qwen3"
                             : c.qkv_bias ? "qwen2"
                                          : "llama";
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
