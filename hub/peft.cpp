// Reads, writes and merges adapters.
#include "hub/peft.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/bad_input.h"
#include "base/json.h"
#include "data/tokenizer/bpe.h"
#include "hub/config.h"
#include "hub/folder.h"
#include "hub/keys.h"
#include "models/adapters/adapters.h"
#include "models/families.h"

namespace tessera {
namespace fs = std::filesystem;
namespace {

using Json = nlohmann::json;

constexpr const char* kAdapterConfig = "adapter_config.json";
constexpr const char* kFile = "adapter_model.safetensors";
constexpr const char* kBaseHash = "base_xxh3";  // metadata key of kFile
constexpr int64_t kMaxLoraRank = 1000000;
constexpr size_t kLongestPattern = 4000;

// Keys without effect on the computation. Initialization settings matter only if init_lora_weights selects them.
constexpr std::string_view kIgnoredPeftKeys =
    "auto_mapping revision inference_mode task_type peft_version megatron_core loftq_config "
    "fan_in_fan_out runtime_config parent_library eva_config corda_config lora_ga_config "
    "megatron_config qalora_group_size";

const std::vector<RestrictedKeys>& restricted_keys_of_peft() {
  // Other initializations subtract the initial adapter from the base's weights, or round the weights (PEFT 0.21,
  // tuners/lora/layer.py).
  static const std::vector<RestrictedKeys> all{
      {"peft_type", {"LORA"}},
      {"init_lora_weights",
       {true, false, "gaussian", "eva", "orthogonal"},
       ", gaussian, eva or orthogonal (others change the weights of the base; PEFT converts such adapters: "
       "save_pretrained(..., path_initial_model_for_weight_conversion=...))"},
      {"bias", {"none", "all", "lora_only"}, ", all or lora_only"},
      {"use_qalora use_bdlora layer_replication target_parameters alora_invocation_tokens arrow_config kasa_config "
       "monteclora_config velora_config"}};
  return all;
}

PeftNames names_in(HubKeys& keys, const std::string& what, const char* key) {
  PeftNames out{.list = {}, .where = what + ": " + key};
  const Json* const value = keys.find(key);
  if (value && value->is_string()) {
    out.all_linear = *value == "all-linear";
    if (!out.all_linear) out.regex = value->get<std::string>();
    if (out.regex.size() > kLongestPattern) keys.refuse(key, fmt::format("at most {} bytes", kLongestPattern), *value);
  }
  for (const Json& one : value && value->is_array() ? *value : Json::array()) {
    if (!one.is_string()) keys.refuse(key, "layer names", *value);
    out.all_linear = out.all_linear || one == "all-linear";
    if (one != "all-linear") out.list.push_back(one.get<std::string>());
  }
  std::ranges::sort(out.list);
  return out;
}

bool matches(const std::string& pattern, const std::string& text, const std::string& where) try {
  return bpe::fullmatch(pattern, text);
} catch (const Error& e) {
  bad_input("{}: '{}' is not a supported regular expression: {}", where, pattern, e.what());
}

// PEFT's tensor names omit the adapter's name and share one prefix.
std::string plain_adapter_name(const std::string& stored) {
  constexpr std::string_view kPrefix = "base_model.model.", kAdapter = ".default.weight";
  std::string out = unwrapped(stored);
  while (out.starts_with(std::string(kPrefix) + std::string(kPrefix))) out.erase(0, kPrefix.size());
  if (out.ends_with(kAdapter)) out.erase(out.size() - kAdapter.size()).append(".weight");
  return out;
}

}  // namespace

std::string hub_layer(const ModelConfig& config, int64_t layer, const LoraTarget& target) {
  const FamilyRow& family = find_row(config.family);
  const std::string_view name = family.find(target.linear)->theirs.at(static_cast<size_t>(target.index));
  return fmt::format("{}.{}.{}", family.layers, layer, name);
}

bool is_peft_folder(const fs::path& folder) {
  return is_plain_file(folder / kAdapterConfig) && !is_there(folder / "config.toml");
}

std::string PeftNames::found(const std::string& layer) const {
  if (all_linear) return "all-linear";
  for (const std::string& name : list)
    if (layer == name || layer.ends_with("." + name)) return name;
  return !regex.empty() && matches(regex, layer, where) ? regex : "";
}

PeftConfig parse_peft_config(std::string_view text, const std::string& what, std::vector<std::string>* notes) {
  HubKeys keys(text, what);
  PeftConfig out;
  if (!keys.find("peft_type"))
    keys.refuse("peft_type",
                keys.find("lora_parameters") ? "\"LORA\" (these are adapters of MLX: mlx_lm.fuse adds them to a model)"
                                             : "\"LORA\"",
                Json());
  keys.check(restricted_keys_of_peft());
  out.lora.rank = keys.size("r", 8, kMaxLoraRank);
  out.lora.alpha = keys.number("lora_alpha", 8, 0, 1e6);
  out.lora.dropout = keys.number("lora_dropout", 0, 0, 1);
  out.lora.rank_stabilised = keys.flag("use_rslora", false);
  for (const auto& [key, into] : {std::pair("rank_pattern", &out.ranks), {"alpha_pattern", &out.alphas}}) {
    const Json* const found = keys.find(key);
    if (!found) continue;
    const auto fits = [is_alpha = key[0] == 'a'](const Json& value) {
      return is_alpha ? value.is_number() && value > 0
                      : natural(value) && *natural(value) >= 1 && *natural(value) <= kMaxLoraRank;
    };
    if (!found->is_object() || !std::ranges::all_of(*found, fits))
      keys.refuse(key, "an object that maps modules to numbers", *found);
    *into = found->get<std::map<std::string, double>>();
  }
  out.magnitudes = keys.flag("use_dora", false), out.adds_bias = keys.flag("lora_bias", false);
  out.biases = keys.text("bias", "none") != "none", out.preserves_tie = keys.flag("ensure_weight_tying", false);
  const PeftNames saved = names_in(keys, what, "modules_to_save");
  if (!saved.regex.empty() || saved.all_linear)
    keys.refuse("modules_to_save", "a list of modules", *keys.find("modules_to_save"));
  out.saved = saved.list;
  if (const Json* const tokens = keys.find("trainable_token_indices"); tokens && !is_nothing(*tokens)) {
    const auto fits = [](const Json& list) {
      return list.is_array() && std::ranges::all_of(list, [](const Json& one) { return natural(one).has_value(); });
    };
    if (tokens->is_object() ? !std::ranges::all_of(*tokens, fits) : !fits(*tokens))
      keys.refuse("trainable_token_indices", "a list of tokens, or an object that maps modules to such lists", *tokens);
    if (tokens->is_object())
      out.tokens = tokens->get<decltype(out.tokens)>();
    else
      out.tokens[""] = tokens->get<std::vector<int64_t>>();
  }
  out.targets = names_in(keys, what, "target_modules");
  if (out.targets.empty()) {
    const Json* const found = keys.find("target_modules");
    keys.refuse("target_modules", "a list of layers, a regular expression, or all-linear", found ? *found : Json());
  }
  out.excluded = names_in(keys, what, "exclude_modules");
  const PeftNames pattern = names_in(keys, what, "layers_pattern");
  out.layers_pattern = pattern.list;
  if (!pattern.regex.empty()) out.layers_pattern.push_back(pattern.regex);
  if (const Json* const layers = keys.find("layers_to_transform"); layers && !is_nothing(*layers)) {
    for (const Json& one : layers->is_array() ? *layers : Json::array({*layers})) {
      if (!natural(one)) keys.refuse("layers_to_transform", "layer indices", *layers);
      out.layers.push_back(*natural(one));
    }
    if (out.targets.list.empty()) keys.refuse("layers_to_transform", "a list of target_modules, as in PEFT", *layers);
  } else if (!out.layers_pattern.empty()) {
    keys.refuse("layers_pattern", "layers_to_transform in addition, as in PEFT", *keys.find("layers_pattern"));
  }
  out.base = keys.text("base_model_name_or_path", "");
  if (const std::string unread = keys.unread(kIgnoredPeftKeys); notes && !unread.empty()) notes->push_back(unread);
  return out;
}

std::string peft_config(const LoraConfig& lora, Family family, const std::string& base) {
  const auto integer = static_cast<int64_t>(lora.alpha);
  const nlohmann::ordered_json out{
      {"peft_type", "LORA"},
      {"task_type", "CAUSAL_LM"},
      {"base_model_name_or_path", base},
      {"r", lora.rank},
      {"lora_alpha", static_cast<double>(integer) == lora.alpha ? Json(integer) : Json(lora.alpha)},
      {"lora_dropout", lora.dropout},
      {"use_rslora", lora.rank_stabilised},
      {"target_modules", lora.targets},
      {"bias", "none"},
      {"fan_in_fan_out", find_row(family).transposed},
      {"inference_mode", true}};
  return out.dump(2) + "\n";
}

std::vector<PeftTensor> peft_tensors(const ModelConfig& config) {
  hub_tensors(config);  // throws if the hub has no names for the base
  const std::unique_ptr<LanguageModel> model = make_model(config);
  std::vector<PeftTensor> out;
  for (const AttachedLora& attached : adapter_tensors(*model)) {
    const std::string layer = "base_model.model." + hub_layer(config, attached.layer, attached.target);
    for (const auto& [matrix, name] : {std::pair{&attached.adapter->a, "lora_A"}, {&attached.adapter->b, "lora_B"}}) {
      const Parameter& p = matrix->parameter(matrix->weight);
      out.push_back({p.name, p.full_shape, fmt::format("{}.{}.weight", layer, name)});
    }
  }
  return out;
}

PeftFolder::PeftFolder(const fs::path& folder)
    : path_(folder),
      config_(parse_peft_config(read_file(folder / kAdapterConfig), (folder / kAdapterConfig).string(), &notes_)) {
  if (!is_there(path_ / kFile)) refuse_without(path_, std::string("no ") + kFile);
  file_ = std::make_shared<const Safetensors>(path_ / kFile, true);
  std::string changed;
  for (const TensorBytes& t : file_->tensors()) {
    const std::string name = plain_adapter_name(t.name);
    if (name != t.name) changed = t.name;
    if (!tensors_.emplace(name, &t).second) bad_input("{}: duplicate tensor '{}'", file_->what(), t.name);
  }
  if (!changed.empty()) notes_.push_back(wrapped_note(file_->what(), changed, plain_adapter_name(changed)));
}

fs::path find_base(const fs::path& name, const fs::path& folder, const std::string& where) {
  const fs::path here = name.empty() ? name : fs::absolute(name), there = folder / name;
  const bool is_in_working_directory = !name.empty() && is_there(here),
             is_in_adapter_directory = !name.empty() && is_there(there);
  if (is_in_working_directory && is_in_adapter_directory && !fs::equivalent(here, there))
    bad_input("{}: '{}' may be {} or {}; select one with --base FOLDER", where, name.string(), here.string(),
              there.string());
  if (!is_in_working_directory && !is_in_adapter_directory)
    bad_input("{}: expected the directory of a model, got '{}'; specify it with --base FOLDER", where, name.string());
  return is_in_working_directory ? fs::path(name) : there;
}

std::string PeftFolder::base_hash() const {
  const auto found = file_->metadata().find(kBaseHash);
  return found == file_->metadata().end() ? "" : found->second;
}

fs::path PeftFolder::base(const std::optional<std::string>& given) const {
  if (given) return *given;
  return find_base(config_.base, path_, (path_ / kAdapterConfig).string() + ": base_model_name_or_path");
}

void write_peft_folder(const fs::path& folder, const ModelConfig& config, DType dtype, const FullTensors& source,
                       const std::string& base, const std::string& base_hash) {
  const std::vector<PeftTensor> all = peft_tensors(config);
  std::vector<TensorBytes> listed;
  for (const PeftTensor& t : all) listed.push_back({t.theirs, dtype, {t.shape.begin(), t.shape.end()}, {}});
  std::map<std::string, std::string> about;
  if (!base_hash.empty()) about[kBaseHash] = base_hash;
  std::vector<std::byte> bytes;
  const auto bytes_at = [&](size_t i) {
    bytes.resize(static_cast<size_t>(all[i].shape.numel() * element_size(dtype)));
    source(all[i].ours, dtype, all[i].shape)(0, bytes);
    return std::span<const std::byte>(bytes);
  };
  stream_safetensors(folder / kFile, listed, bytes_at, about);
  write_file(folder / kAdapterConfig, peft_config(config.lora, config.family, base));
}

}  // namespace tessera
