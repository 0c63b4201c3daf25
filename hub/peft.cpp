// Reading, writing and merging adapters.
#include "hub/peft.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <map>
#include <nlohmann/json.hpp>
#include <set>

#include "data/files.h"
#include "data/json.h"
#include "hub/config.h"
#include "hub/folder.h"
#include "models/adapters/adapters.h"
#include "tensor/error.h"
#include "tensor/write_file.h"

namespace tessera {
namespace fs = std::filesystem;
namespace {

using Json = nlohmann::json;

constexpr const char* kAdapterConfig = "adapter_config.json";
constexpr const char* kFile = "adapter_model.safetensors";
constexpr int64_t kMostRank = 1000000;

// About how adapters were made and trained: what they compute does not depend on them.
const std::set<std::string>& of_training() {
  static const std::set<std::string> keys{
      "auto_mapping",  "revision",          "inference_mode",    "task_type",           "peft_version",
      "megatron_core", "layers_pattern",    "init_lora_weights", "ensure_weight_tying", "fan_in_fan_out",
      "loftq_config",  "qalora_group_size", "runtime_config",    "parent_library"};
  return keys;
}

std::vector<std::string> targets_of(const Json& value, const std::string& what) {
  if (value.is_string() && value.get<std::string>() == "all-linear") return {"all-linear"};
  std::vector<std::string> out;
  for (const Json& one : value.is_array() ? value : Json::array()) {
    if (!one.is_string()) throw InputError(what + ": target_modules: expected names of layers");
    out.push_back(one.get<std::string>());
  }
  if (out.empty()) throw InputError(what + ": target_modules: expected a list of layers, or all-linear");
  std::ranges::sort(out);
  return out;
}

double number_of(const Json& json, const char* key, double least, double most, const std::string& what) {
  const Json value = json.value(key, Json());
  if (!value.is_number() || !(value.get<double>() >= least && value.get<double>() <= most))
    throw InputError(fmt::format("{}: {}: expected a number in [{}, {}], found {}", what, key, least, most,
                                 value.dump().substr(0, 100)));
  return value.get<double>();
}

// As PEFT looks for them: the whole name of a layer, or the end of one.
bool names_layer(const std::string& target, const std::string& layer) {
  return layer == target || layer.ends_with("." + target);
}

// The layer that a target is, as transformers names it.
std::string hub_layer(const ModelConfig& config, int64_t layer, const LoraTarget& target) {
  const FamilyRow& family = row_of(config.family);
  const std::string_view name = family.find(target.linear)->theirs.at(static_cast<size_t>(target.part));
  return fmt::format("{}.{}.{}", family.layers, layer, name);
}

}  // namespace

bool is_peft_folder(const fs::path& folder) {
  std::error_code error;
  return fs::is_regular_file(folder / kAdapterConfig, error) && !fs::exists(folder / "config.toml", error);
}

PeftConfig parse_peft_config(std::string_view text, const std::string& what) {
  const Json json = parse_json(text, what);
  if (!json.is_object()) throw InputError(what + ": expected an object");
  PeftConfig out;
  const auto expect = [&](const char* key, const Json& wanted) {
    if (const Json found = json.value(key, wanted); found != wanted)
      throw InputError(
          fmt::format("{}: {}: expected {}, found {}", what, key, wanted.dump(), found.dump().substr(0, 100)));
  };
  if (!json.contains("peft_type")) throw InputError(what + ": peft_type: expected \"LORA\", found none");
  expect("peft_type", "LORA");
  expect("bias", "none");
  const std::set<std::string> read{"peft_type",
                                   "bias",
                                   "r",
                                   "lora_alpha",
                                   "lora_dropout",
                                   "use_rslora",
                                   "target_modules",
                                   "base_model_name_or_path"};
  for (const auto& [key, value] : json.items())
    if (!read.contains(key) && !of_training().contains(key) && !is_nothing(value))
      throw InputError(fmt::format("{}: {}: expected nothing, found {}", what, key.substr(0, 100),
                                   value.dump(-1, ' ', false, Json::error_handler_t::replace).substr(0, 100)));
  const auto rank = natural(json.value("r", Json()));
  if (!rank || *rank < 1 || *rank > kMostRank)
    throw InputError(fmt::format("{}: r: expected a whole number in [1, {}]", what, kMostRank));
  out.lora.rank = *rank;
  out.lora.alpha = number_of(json, "lora_alpha", 0, 1e6, what);
  if (json.contains("lora_dropout")) out.lora.dropout = number_of(json, "lora_dropout", 0, 1, what);
  const Json stabilised = json.value("use_rslora", Json(false));
  if (!stabilised.is_boolean()) throw InputError(what + ": use_rslora: expected true or false");
  out.lora.rank_stabilised = stabilised.get<bool>();
  out.lora.targets = targets_of(json.value("target_modules", Json()), what);
  const Json base = json.value("base_model_name_or_path", Json());
  if (!base.is_null() && !base.is_string()) throw InputError(what + ": base_model_name_or_path: expected a path");
  if (base.is_string()) out.base = base.get<std::string>();
  return out;
}

std::string peft_config(const LoraConfig& lora, Family family, const std::string& base) {
  const auto whole = static_cast<int64_t>(lora.alpha);
  const nlohmann::ordered_json out{
      {"peft_type", "LORA"},
      {"task_type", "CAUSAL_LM"},
      {"base_model_name_or_path", base},
      {"r", lora.rank},
      {"lora_alpha", static_cast<double>(whole) == lora.alpha ? Json(whole) : Json(lora.alpha)},
      {"lora_dropout", lora.dropout},
      {"use_rslora", lora.rank_stabilised},
      {"target_modules", lora.targets},
      {"bias", "none"},
      {"fan_in_fan_out", row_of(family).transposed},
      {"inference_mode", true}};
  return out.dump(2) + "\n";
}

std::vector<PeftTensor> peft_tensors(const ModelConfig& config) {
  hub_tensors(config);  // throws where the hub has no names for all of the base
  const std::unique_ptr<LanguageModel> model = make_model(config);
  std::vector<PeftTensor> out;
  for (const AttachedLora& attached : adapters_of(*model)) {
    const std::string layer = "base_model.model." + hub_layer(config, attached.layer, attached.target);
    for (const auto& [matrix, name] : {std::pair{&attached.adapter->a, "lora_A"}, {&attached.adapter->b, "lora_B"}}) {
      const Parameter& p = matrix->parameter(matrix->weight);
      out.push_back({p.name, p.whole, fmt::format("{}.{}.weight", layer, name)});
    }
  }
  return out;
}

PeftFolder::PeftFolder(const fs::path& folder)
    : path_(folder),
      config_(parse_peft_config(read_file(folder / kAdapterConfig), (folder / kAdapterConfig).string())) {
  std::error_code error;
  if (!fs::exists(path_ / kFile, error))
    throw InputError(fmt::format("{}: no {}; files of other formats are not read", path_.string(), kFile));
  file_ = std::make_shared<const Safetensors>(path_ / kFile, true);
}

fs::path PeftFolder::base() const {
  std::error_code error;
  for (const fs::path& at : {fs::path(config_.base), path_ / config_.base})
    if (!config_.base.empty() && fs::is_directory(at, error)) return at;
  throw InputError(fmt::format("{}: base_model_name_or_path: expected the folder of a model, found '{}'",
                               (path_ / kAdapterConfig).string(), config_.base));
}

ModelConfig PeftFolder::config(const ModelConfig& base) const {
  ModelConfig out = base;
  out.lora = config_.lora;
  out.lora.dropout = 0;
  out.lora.targets.clear();
  hub_tensors(base);  // throws where the hub has no names for all of it
  std::set<std::string> used;
  std::vector<std::string_view> names;
  for (const LoraTarget& target : lora_targets(base)) {
    names.push_back(target.name);
    int64_t layers = 0;  // that have the target
    for (int64_t i = 0; i < base.layers; ++i) {
      const std::string layer = hub_layer(base, i, target);
      bool wanted = false;
      for (const std::string& t : config_.lora.targets)
        if (t == "all-linear" || names_layer(t, layer)) {
          wanted = true;
          used.insert(t);
        }
      layers += wanted ? 1 : 0;
    }
    if (layers == 0) continue;
    if (layers < base.layers)
      throw InputError(fmt::format("{}: target_modules: {} of {} layers; expected all of them or none",
                                   (path_ / kAdapterConfig).string(), target.name, layers));
    out.lora.targets.emplace_back(target.name);
  }
  for (const std::string& t : config_.lora.targets)
    if (!used.contains(t))
      throw InputError(fmt::format("{}: target_modules: the base has no layer '{}' that adapts; expected some of {}",
                                   (path_ / kAdapterConfig).string(), t, fmt::join(names, ", ")));
  return out;
}

WholeTensors PeftFolder::tensors(const ModelConfig& config, WholeTensors base) const {
  std::map<std::string, const TensorBytes*> ours;
  std::set<std::string> known;
  for (const PeftTensor& t : peft_tensors(config)) {
    const TensorBytes& found = file_->at(t.theirs);
    if (!is_floating(found.dtype) || found.shape != std::vector<int64_t>(t.shape.begin(), t.shape.end()))
      throw InputError(fmt::format("{}: tensor '{}' is {} of ({}); expected floating numbers of {}", file_->what(),
                                   t.theirs, name_of(found.dtype), fmt::join(found.shape, ", "), t.shape.str()));
    ours[t.ours] = &found;
    known.insert(t.theirs);
  }
  file_->expect_no_others(known);
  return [ours, base = std::move(base), kept = file_](const std::string& name, DType dtype,
                                                      const Shape& shape) -> TensorReader {
    const auto found = ours.find(name);
    if (found == ours.end()) return base(name, dtype, shape);
    return [from = found->second, kept, dtype](int64_t begin, std::span<std::byte> to) {
      convert(*from, begin, dtype, to);
    };
  };
}

void write_peft_folder(const fs::path& folder, const ModelConfig& config, DType dtype, const WholeTensors& source,
                       const std::string& base) {
  const std::vector<PeftTensor> all = peft_tensors(config);
  std::vector<TensorBytes> listed;
  for (const PeftTensor& t : all) listed.push_back({t.theirs, dtype, {t.shape.begin(), t.shape.end()}, {}});
  std::vector<std::byte> bytes;
  stream_safetensors(folder / kFile, listed, [&](size_t i) {
    bytes.resize(static_cast<size_t>(all[i].shape.numel() * size_of(dtype)));
    source(all[i].ours, dtype, all[i].shape)(0, bytes);
    return std::span<const std::byte>(bytes);
  });
  write_file(folder / kAdapterConfig, peft_config(config.lora, config.family, base));
}

ModelConfig merged(ModelConfig config) {
  config.lora = {};
  config.quantize = {};
  return config;
}

namespace {

std::vector<float> floats_of(const WholeTensors& source, Linear& matrix) {
  const Parameter& p = matrix.parameter(matrix.weight);
  std::vector<float> out(static_cast<size_t>(p.whole.numel()));
  source(p.name, DType::float32, p.whole)(0, std::as_writable_bytes(std::span(out)));
  return out;
}

}  // namespace

WholeTensors merged(const ModelConfig& config, WholeTensors source) {
  const std::shared_ptr<LanguageModel> model = make_model(config);
  std::map<std::string, std::vector<AttachedLora>> adapted;
  for (const AttachedLora& one : adapters_of(*model))
    adapted[one.linear->parameter(one.linear->weight).name].push_back(one);
  return [model, adapted, source = std::move(source), scale = config.lora.scale()](const std::string& name, DType dtype,
                                                                                   const Shape& shape) -> TensorReader {
    const auto found = adapted.find(name);
    if (found == adapted.end()) return source(name, dtype, shape);
    return [&parts = found->second, source, scale, name, dtype, shape, model](int64_t begin, std::span<std::byte> to) {
      const int64_t width = shape[1], count = std::ssize(to) / size_of(dtype);
      std::vector<float> sum(static_cast<size_t>(count));
      source(name, DType::float32, shape)(begin, std::as_writable_bytes(std::span(sum)));
      for (const AttachedLora& one : parts) {
        const std::vector<float> a = floats_of(source, one.adapter->a), b = floats_of(source, one.adapter->b);
        const int64_t rank = one.adapter->a.weight.dim(0), first = one.adapter->first() * width,
                      end = first + one.adapter->b.weight.dim(0) * width;
        for (int64_t i = std::max(begin, first); i < std::min(begin + count, end); ++i) {
          const int64_t row = (i - first) / width, column = i % width;
          double product = 0;
          for (int64_t r = 0; r < rank; ++r)
            product += static_cast<double>(b[static_cast<size_t>(row * rank + r)]) *
                       static_cast<double>(a[static_cast<size_t>(r * width + column)]);
          sum[static_cast<size_t>(i - begin)] += static_cast<float>(scale * product);
        }
      }
      convert({name, DType::float32, {count}, std::as_bytes(std::span(sum))}, 0, dtype, to);
    };
  };
}

}  // namespace tessera
