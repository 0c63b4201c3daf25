// The table of model types and their keys, and what is read and written by it.
#include "hub/config.h"

#include <fmt/format.h>

#include <algorithm>
#include <functional>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <set>
#include <variant>

#include "data/json.h"
#include "models/adapters/adapters.h"
#include "tensor/error.h"

namespace tessera {
namespace {

using Json = nlohmann::json;

// Keys for which no layer computes another thing, by what they are about.
struct PassedOver {
  std::string_view about;
  std::vector<std::string_view> keys;
};
const std::vector<PassedOver>& passed_over() {
  static const std::vector<PassedOver> all{
      {"the file", {"_name_or_path", "architectures", "transformers_version", "torch_dtype", "dtype", "auto_map"}},
      {"tokens", {"bos_token_id", "eos_token_id", "pad_token_id", "unk_token_id"}},
      {"training", {"initializer_range", "attention_dropout", "resid_pdrop", "embd_pdrop", "attn_pdrop"}},
      {"training", {"gradient_checkpointing", "pretraining_tp"}},
      {"other tasks", {"summary_type", "summary_use_proj", "summary_activation", "summary_first_dropout"}},
      {"other tasks", {"summary_proj_to_labels", "problem_type", "task_specific_params", "finetuning_task"}},
      {"other tasks", {"id2label", "label2id", "is_encoder_decoder"}},
      {"the program", {"use_cache", "return_dict", "output_hidden_states", "output_attentions"}},
      {"the program", {"chunk_size_feed_forward", "_attn_implementation", "attn_implementation"}},
      {"what other keys say", {"n_ctx", "max_window_layers", "rope_type", "original_max_position_embeddings"}}};
  return all;
}

// The keys of an object, each asked for by its name; one that nobody has asked for is refused at the end.
class Keys {
 public:
  // Both must outlive it; `what` names the file in messages. Everything throws InputError.
  Keys(const Json& json, const std::string& what) : json_(json), what_(what) {
    if (!json.is_object()) throw InputError(what + ": expected an object");
  }

  [[noreturn]] void refuse(std::string_view key, std::string_view expected, const Json& found) const {
    std::string text = found.dump(-1, ' ', true, Json::error_handler_t::replace);
    if (text.size() > 60) text = text.substr(0, 60) + "...";
    throw InputError(fmt::format("{}: the key '{}': expected {}, found {}", what_, key, expected, text));
  }

  // null counts as a key that is not there.
  const Json* find(std::string_view key) {
    const auto found = json_.find(*known_.emplace(key).first);
    return found == json_.end() || found->is_null() ? nullptr : &*found;
  }

  // A size, a whole number of at least one. The key must be there if nothing is usual.
  int64_t size(std::string_view key, std::optional<int64_t> usual = {}) {
    const Json* const found = given(key, "a size", usual.has_value(), [](const Json& value) {
      const std::optional<int64_t> size = natural(value);
      return size && *size >= 1 && *size <= int64_t{1} << 40;
    });
    return found ? found->get<int64_t>() : *usual;
  }
  double number(std::string_view key, std::optional<double> usual = {}) {
    const Json* const found = given(key, "a number above 0", usual.has_value(), [](const Json& value) {
      return value.is_number() && value.get<double>() > 0 && value.get<double>() <= 1e12;
    });
    return found ? found->get<double>() : *usual;
  }
  bool flag(std::string_view key, bool usual) {
    const Json* const found = given(key, "true or false", true, &Json::is_boolean);
    return found ? found->get<bool>() : usual;
  }

  // All keys were asked for, but those that are passed over.
  void end() const {
    const auto is_passed = [](const std::string& key) {
      return std::ranges::any_of(
          passed_over(), [&](const PassedOver& one) { return std::ranges::find(one.keys, key) != one.keys.end(); });
    };
    for (const auto& [key, value] : json_.items())
      if (!known_.contains(key) && !is_passed(key) && !value.is_null())
        throw InputError(fmt::format("{}: the key '{}' is not known; Tessera may not compute what it asks for", what_,
                                     key.substr(0, 60)));
  }

 private:
  // A value that fits; null where it may be missing and is.
  template <class Fits>
  const Json* given(std::string_view key, const char* expected, bool may_miss, const Fits& fits) {
    const Json* const found = find(key);
    if (found ? !std::invoke(fits, *found) : !may_miss) refuse(key, expected, found ? *found : Json());
    return found;
  }

  const Json& json_;
  const std::string& what_;
  std::set<std::string> known_;
};

// --- the table ---

constexpr int64_t kMostLayers = 100000, kMostExperts = 10000;
constexpr std::string_view kNoWindow = ": every token attends to all before it";

using Model = ModelConfig;
using Field = std::variant<std::monostate, int64_t Model::*, double Model::*, int64_t ExpertConfig::*,
                           RouterSoftmax ExpertConfig::*, double RotaryOptions::*>;

// A key: where its value goes; or the values that it may have, the first of which is written; or neither, and it is
// passed over.
struct Key {
  std::string_view name;
  Field field = {};
  // The size of a model that the file does not name, by the keys before this one; null: it must. Other values are then
  // those of HubType::base.
  int64_t (Model::*usual)() const = nullptr;
  int64_t most = int64_t{1} << 40;
  std::vector<Json> values = {};
  std::string_view because = {};  // behind what was expected
  std::string_view also = {};     // another name of the key, which is read where the first is missing
};
using KeyList = std::vector<Key>;

struct HubType {
  std::string_view name, architecture;
  ModelConfig base;                       // says what the type says, and what is so where the file says nothing
  KeyList written;                        // in this order
  KeyList read = {};                      // these are not written
  std::vector<TensorNames> experts = {};  // in every layer
  bool default_window = false;            // where "sliding_window" is left out, there is one
};

Key held(std::string_view name, std::vector<Json> values, std::string_view because = "") {
  return {.name = name, .values = std::move(values), .because = because};
}

KeyList operator+(KeyList keys, const KeyList& more) {
  keys.insert(keys.end(), more.begin(), more.end());
  return keys;
}

// The keys of all types that are built like Llama, which differ in what may be left out.
KeyList llama_keys(const Key& kv_heads, const KeyList& more) {
  return KeyList{held("hidden_act", {"silu"}),
                 {"num_hidden_layers", &Model::layers, nullptr, kMostLayers},
                 {"num_attention_heads", &Model::heads},
                 kv_heads,
                 {"hidden_size", &Model::channels},
                 {"intermediate_size", &Model::ffn},
                 {"max_position_embeddings", &Model::context},
                 {"vocab_size", &Model::vocab},
                 {"rms_norm_eps", &Model::norm_eps},
                 {"rope_theta", &RotaryOptions::theta}} +
         more;
}

std::vector<HubType> make_types() {
  const KeyList no_biases{held("attention_bias", {false}), held("mlp_bias", {false})};
  const Key no_window = held("sliding_window", {nullptr}, kNoWindow), kv_heads{"num_key_value_heads", &Model::kv_heads},
            head_dim{"head_dim", &Model::head_dim},
            usual_kv_heads{"num_key_value_heads", &Model::kv_heads, &Model::key_heads},
            usual_head_dim{"head_dim", &Model::head_dim, &Model::head_size};
  const KeyList llama = no_biases + KeyList{no_window},
                qwen = no_biases + KeyList{{"sliding_window"}, held("use_sliding_window", {false})},
                experts{{"router_aux_loss_coef"}, {"output_router_logits"}};
  const ModelConfig like_llama{.family = Family::llama, .tied = false, .norm_eps = 1e-6};
  ModelConfig like_qwen2 = like_llama, like_qwen3 = like_llama, like_qwen3_moe = like_llama;
  like_qwen2.qkv_bias = true;
  like_qwen3.qk_norm = like_qwen3_moe.qk_norm = true;
  like_qwen3_moe.experts.softmax = RouterSoftmax::all;
  return {
      {"gpt2",
       "GPT2LMHeadModel",
       {},
       {held("activation_function", {"gelu_new", "gelu_pytorch_tanh"}),
        {"n_layer", &Model::layers, nullptr, kMostLayers},
        {"n_head", &Model::heads},
        {"n_embd", &Model::channels},
        {"n_inner", &Model::ffn, &Model::hidden},
        {"n_positions", &Model::context},
        {"vocab_size", &Model::vocab},
        {"layer_norm_epsilon", &Model::norm_eps}},
       {held("scale_attn_weights", {true}), held("scale_attn_by_inverse_layer_idx", {false}),
        held("reorder_and_upcast_attn", {false}), held("add_cross_attention", {false})}},
      {"llama", "LlamaForCausalLM", like_llama, llama_keys(usual_kv_heads, {usual_head_dim}), llama},
      {.name = "mistral",
       .architecture = "MistralForCausalLM",
       .base = like_llama,
       .written = llama_keys(kv_heads, {usual_head_dim}),
       .read = llama,
       .default_window = true},
      {"qwen2", "Qwen2ForCausalLM", like_qwen2, llama_keys(kv_heads, {}), qwen + KeyList{usual_head_dim}},
      {"qwen3", "Qwen3ForCausalLM", like_qwen3, llama_keys(kv_heads, {head_dim}), qwen},
      {"mixtral",
       "MixtralForCausalLM",
       like_llama,
       llama_keys(kv_heads, {usual_head_dim,
                             {"num_local_experts", &ExpertConfig::count, nullptr, kMostExperts},
                             {"num_experts_per_tok", &ExpertConfig::per_token},
                             no_window}),
       no_biases + experts + KeyList{held("router_jitter_noise", {0.0})},
       {{"mlp.router", {"block_sparse_moe.gate"}},
        {"mlp.experts.gate_up", {"block_sparse_moe.experts.{}.w1", "block_sparse_moe.experts.{}.w3"}},
        {"mlp.experts.down", {"block_sparse_moe.experts.{}.w2"}}}},
      {"qwen3_moe",
       "Qwen3MoeForCausalLM",
       like_qwen3_moe,
       llama_keys(
           kv_heads,
           {head_dim,
            {.name = "num_experts", .field = &ExpertConfig::count, .most = kMostExperts, .also = "num_local_experts"},
            {"num_experts_per_tok", &ExpertConfig::per_token},
            {"moe_intermediate_size", &Model::ffn},
            {"norm_topk_prob", &ExpertConfig::softmax},
            held("decoder_sparse_step", {1}),
            held("mlp_only_layers", {Json::array()})}),
       qwen + experts,
       {{"mlp.router", {"mlp.gate"}},
        {"mlp.experts.gate_up", {"mlp.experts.{}.gate_proj", "mlp.experts.{}.up_proj"}},
        {"mlp.experts.down", {"mlp.experts.{}.down_proj"}}}}};
}

const std::vector<HubType>& types() {
  static const std::vector<HubType> all = make_types();
  return all;
}

// The plainest type that has all that the model has, or null.
const HubType* type_of(const ModelConfig& c) {
  const auto found = std::ranges::find_if(types(), [&](const HubType& t) {
    return t.base.family == c.family && t.base.qkv_bias == c.qkv_bias && t.base.qk_norm == c.qk_norm &&
           t.experts.empty() == (c.experts.count == 0);
  });
  return found == types().end() ? nullptr : &*found;
}

// --- reading ---

void read(Keys& keys, const Key& key, ModelConfig& c, int64_t& to) {
  const std::string_view name = key.also.empty() || keys.find(key.name) ? key.name : key.also;
  to = keys.size(name, key.usual ? std::optional((c.*key.usual)()) : std::nullopt);
  if (to > key.most) keys.refuse(name, fmt::format("at most {}", key.most), to);
}
void read(Keys& keys, const Key& key, ModelConfig&, double& to) { to = keys.number(key.name, to); }
void read(Keys& keys, const Key& key, ModelConfig&, RouterSoftmax& to) {
  to = keys.flag(key.name, to == RouterSoftmax::chosen) ? RouterSoftmax::chosen : RouterSoftmax::all;
}

// The field of a model that a key is for: f(field); nothing where it is for none.
template <class F>
void with_field(const Key& key, ModelConfig& c, const F& f) {
  std::visit(
      [&]<class To>(To to) {
        if constexpr (std::is_invocable_v<To, ModelConfig&>)
          f(c.*to);
        else if constexpr (std::is_invocable_v<To, ExpertConfig&>)
          f(c.experts.*to);
        else if constexpr (std::is_invocable_v<To, RotaryOptions&>)
          f(c.rotary.*to);
      },
      key.field);
}

// "rope_scaling" of older files, or "rope_parameters", in which theta may stand too.
void read_rope_object(const Json& json, const std::string& what, ModelConfig& c) {
  Keys keys(json, what);
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

void read_rope(Keys& keys, const std::string& what, ModelConfig& c) {
  for (const char* key : {"rope_scaling", "rope_parameters"})
    if (const Json* object = keys.find(key)) read_rope_object(*object, what + ": " + key, c);
  if (const Json* layers = keys.find("layer_types"))
    if (!layers->is_array() || std::ranges::any_of(*layers, [](const Json& l) { return l != "full_attention"; }))
      keys.refuse("layer_types", "full_attention of every layer", *layers);
}

// Sizes that fit each other, and fit into memory.
void check_sizes(const Keys& keys, const std::string& what, const ModelConfig& c, bool has_head_dim) {
  const bool gpt2 = c.family == Family::gpt2;
  if (c.channels % c.heads != 0 && !has_head_dim)
    keys.refuse(gpt2 ? "n_head" : "num_attention_heads", "a divisor of the channels", c.heads);
  if (c.heads % c.key_heads() != 0) keys.refuse("num_key_value_heads", "a divisor of the heads", c.kv_heads);
  if (row_of(c.family).rotary && c.head_dim % 2 != 0) keys.refuse("head_dim", "an even number", c.head_dim);
  constexpr int64_t kMost = int64_t{1} << 60;  // any product of two sizes
  for (const int64_t rows : {c.vocab, c.context, 2 * c.hidden(), 3 * c.attended()})
    if (rows > kMost / c.channels)
      throw InputError(fmt::format("{}: a tensor of {} x {} elements; no memory has so many", what, rows, c.channels));
  if (c.experts.count > 0 && c.experts.per_token > c.experts.count)
    keys.refuse("num_experts_per_tok", fmt::format("at most the {} experts", c.experts.count), c.experts.per_token);
}

}  // namespace

ModelConfig parse_hub_config(std::string_view text, const std::string& what, std::optional<GptqConfig>* gptq) {
  const Json json = parse_json(text, what);
  Keys keys(json, what);
  const Json* const found = keys.find("model_type");
  const auto type = std::ranges::find_if(types(), [&](const HubType& t) { return found && *found == t.name; });
  if (type == types().end())
    keys.refuse("model_type", "gpt2, llama, mistral, qwen2, qwen3, mixtral or qwen3_moe", found ? *found : Json());
  if (type->default_window && !json.contains("sliding_window"))
    keys.refuse("sliding_window", "null" + std::string(kNoWindow), "none, which means 4096");
  ModelConfig c = type->base;
  for (const KeyList* list : {&type->written, &type->read})
    for (const Key& key : *list) {
      with_field(key, c, [&](auto& field) { read(keys, key, c, field); });
      const Json* const value = keys.find(key.name);
      if (value && !key.values.empty() && std::ranges::find(key.values, *value) == key.values.end())
        keys.refuse(key.name, key.values[0].dump() + std::string(key.because), *value);
    }
  c.tied = keys.flag("tie_word_embeddings", c.tied);
  if (row_of(c.family).rotary) read_rope(keys, what, c);
  if (const Json* const quantised = gptq ? keys.find("quantization_config") : nullptr)
    *gptq = parse_gptq_config(quantised->dump(), what + ": quantization_config");
  keys.end();
  check_sizes(keys, what, c, json.contains("head_dim"));
  return c;
}

// --- writing ---

namespace {

// Why the hub has no type for a model; empty where it has one.
std::string missing_type(const ModelConfig& c) {
  const bool gpt2 = c.family == Family::gpt2, experts = c.experts.count > 0;
  const bool own_heads = c.head_size() * c.heads != c.channels;
  if (experts && (gpt2 || c.qkv_bias))
    return "the hub has experts in mixtral and qwen3_moe, which are of the family llama and have no biases";
  if (gpt2 && (c.key_heads() != c.heads || own_heads))
    return fmt::format("the hub has no gpt2 with {} heads of keys of {} numbers beside {} heads and {} channels",
                       c.key_heads(), c.head_size(), c.heads, c.channels);
  if (c.qkv_bias && c.qk_norm) return "the hub has no family with both biases of q, k and v and norms of q and k";
  if (c.qkv_bias && own_heads) return "the hub's qwen2 has no heads of another size than channels / heads";
  if (experts && c.experts.shared > 0) return "the hub's mixtral and qwen3_moe have no shared experts";
  if (experts && !c.qk_norm && c.experts.softmax == RouterSoftmax::all)
    return "the hub's mixtral has weights that are shares among the chosen experts, not among all";
  return type_of(c) ? "" : "the hub has no type of models with these parts";
}

Json value_of(int64_t value) { return value; }
Json value_of(double value) { return value; }
Json value_of(RouterSoftmax value) { return value == RouterSoftmax::chosen; }

nlohmann::ordered_json rope_object(const RotaryOptions& r) {
  nlohmann::ordered_json rope = {{"rope_type", "default"}, {"rope_theta", r.theta}};
  if (r.scaling == RopeScaling::none) return rope;
  rope["rope_type"] = r.scaling == RopeScaling::linear ? "linear" : "llama3";
  rope["factor"] = r.factor;
  if (r.scaling == RopeScaling::linear) return rope;
  rope["low_freq_factor"] = r.low_freq_factor;
  rope["high_freq_factor"] = r.high_freq_factor;
  rope["original_max_position_embeddings"] = r.original_context;
  return rope;
}

}  // namespace

std::string hub_config(const ModelConfig& config, DType dtype, const GptqConfig* gptq) {
  if (const std::string missing = missing_type(config); !missing.empty()) throw Error(missing);
  const HubType& type = *type_of(config);
  ModelConfig c = config;
  c.kv_heads = c.key_heads(), c.ffn = c.hidden(), c.head_dim = c.head_size();
  nlohmann::ordered_json out{{"architectures", {type.architecture}}, {"model_type", type.name}};
  for (const Key& key : type.written) {
    if (!key.values.empty()) out[std::string(key.name)] = key.values[0];
    with_field(key, c, [&](const auto& field) { out[std::string(key.name)] = value_of(field); });
  }
  if (row_of(c.family).rotary) {
    const nlohmann::ordered_json rope = rope_object(c.rotary);
    if (c.rotary.scaling != RopeScaling::none) out["rope_scaling"] = rope;
    out["rope_parameters"] = rope;
  }
  out["tie_word_embeddings"] = c.tied;
  for (const char* key : {"torch_dtype", "dtype"}) out[key] = name_of(dtype);
  if (gptq) out["quantization_config"] = nlohmann::ordered_json::parse(gptq_config(*gptq));
  return out.dump(2) + "\n";
}

// --- names of tensors ---

namespace {

// Their names for a part of a layer: "mlp.down", "mlp.experts.7.down".
std::vector<std::string> names_of(const std::string& part, const ModelConfig& c) {
  if (const TensorNames* found = row_of(c.family).find(part)) return {found->theirs.begin(), found->theirs.end()};
  constexpr std::string_view kExperts = "mlp.experts.";
  std::string kind = part, number;
  if (part.starts_with(kExperts)) {
    const size_t end = part.find('.', kExperts.size());
    number = part.substr(kExperts.size(), end - kExperts.size());
    kind = std::string(kExperts) + part.substr(end + 1);
  }
  std::vector<std::string> out;
  const auto type = std::ranges::find(types(), c.qk_norm ? "qwen3_moe" : "mixtral", &HubType::name);
  const auto found = std::ranges::find(type->experts, kind, &TensorNames::ours);
  if (found == type->experts.end()) throw Error("the hub has no name for '" + part + "' of a layer");
  for (const std::string_view name : found->theirs) {
    std::string& one = out.emplace_back(name);
    if (const size_t at = one.find("{}"); at != std::string::npos) one.replace(at, 2, number);
  }
  return out;
}

}  // namespace

std::vector<int64_t> HubTensor::shape_of(const Piece& piece) const {
  if (shape.rank() == 1) return {piece.rows};
  return transposed ? std::vector<int64_t>{shape[1], piece.rows} : std::vector<int64_t>{piece.rows, shape[1]};
}

std::vector<HubTensor> hub_tensors(const ModelConfig& config) {
  const FamilyRow& family = row_of(config.family);
  ModelConfig plain = config;
  plain.tie_copies = false;
  plain.lora = {};
  const std::unique_ptr<LanguageModel> model = make_model(plain);
  std::map<const Parameter*, std::pair<int64_t, std::string>> layers;  // the number, and the layer's own name
  for (int64_t i = 0; i < plain.layers; ++i)
    for (const Parameter* p : model->layer(i).parameters()) layers[p] = {i, model->layer(i).full_name()};
  std::vector<HubTensor> out;
  for (const Parameter* p : model->parameters()) {
    HubTensor& tensor = out.emplace_back(HubTensor{.name = p->name, .shape = p->whole, .pieces = {}});
    const auto inside = layers.find(p);
    if (inside == layers.end()) {
      const auto names = std::ranges::find(family.outside, p->name, &TensorNames::ours);
      tensor.pieces.push_back({std::string(names->theirs.at(0)), p->whole[0]});
      continue;
    }
    const auto& [layer, above] = inside->second;
    const size_t begin = above.size() + 1, kind = p->name.rfind('.');
    const std::vector<std::string> names = names_of(p->name.substr(begin, kind - begin), config);
    const std::vector<int64_t> rows = fused_rows(config, names.size(), p->whole[0]);
    for (size_t i = 0; i < names.size(); ++i)
      tensor.pieces.push_back(
          {fmt::format("{}.{}.{}{}", family.layers, layer, names[i], p->name.substr(kind)), rows[i]});
    tensor.transposed = family.transposed && p->whole.rank() == 2;
  }
  return out;
}

}  // namespace tessera
