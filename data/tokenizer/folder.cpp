// The tokenizer of a Hugging Face directory, whose files define tokens in six places, as in transformers 5.24. Keys are
// those of tokenizer_config.json unless another file is named:
//
//   place                                    used
//   tokenizer.json, `added_tokens`           always; only its post_processor defines the tokens around a text
//   `add_bos_token`, `add_eos_token`         only without tokenizer.json, for every class
//   `added_tokens_decoder`                   always
//   special_tokens_map.json                  unless there is an `added_tokens_decoder`; overrides the keys below
//   added_tokens.json                        unless there is an `added_tokens_decoder`
//   `bos_token` ... `mask_token`, other      always
//   `..._token`, `extra_special_tokens` and
//   `additional_special_tokens` (old name)
//
// Some classes define the normalizer, the pre_tokenizer and the decoder themselves (overriding_rules()), depending on
// `add_prefix_space` and `legacy`, and use only the other components of tokenizer.json.
//
// A token that tokenizer.json does not list retains its id in the vocabulary or gets the next free id, whatever id the
// other file specifies: first the tokens of the decoder or of added_tokens.json by their ids there, then named tokens,
// then extra tokens. Versions before 5 let `add_bos_token` and `add_eos_token` override the post_processor of
// LlamaTokenizerFast, GemmaTokenizerFast and CohereTokenizerFast. Without tokenizer.json, a class builds one from
// vocab.json and merges.txt and defines the default special tokens at the beginning and end.
#include <algorithm>
#include <array>
#include <charconv>
#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <system_error>
#include <vector>

#include "base/bad_input.h"
#include "base/files.h"
#include "base/json.h"
#include "data/tokenizer/described.h"
#include "data/tokenizer/hub_file.h"

namespace tessera {

using hub::kTokenizer, hub::kConfig, hub::kNames, hub::kTemplate, hub::kGeneration, hub::kTokenKeys;

namespace {

using Json = nlohmann::json;

constexpr const char *kAdded = "added_tokens.json", *kModel = "config.json", *kVocab = "vocab.json",
                     *kDecoder = "added_tokens_decoder", *kExtra = "extra_special_tokens",
                     *kOldExtra = "additional_special_tokens";
constexpr const char *kGpt2 = "GPT2Tokenizer", *kQwen = "Qwen2Tokenizer", *kLlama = "LlamaTokenizer";
constexpr const char* kQwenPattern =
    R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)";
constexpr std::array kIds{"bos_token_id", "eos_token_id", "pad_token_id"};

Json read_json(const HubTokenizer::Files& files, const char* name, const std::string& what) {
  const auto file = files.find(name);
  if (file == files.end()) return {};
  Json out = parse_json(file->second, what + name, JsonFile::others);
  if (!out.is_object()) throw InputError(what + name + ": expected one object");
  return out;
}

// Returns an entry of `added_tokens` without its id.
Json added_token(const Json& from, bool special) {
  const Json& name = from.is_object() ? value_at(from, "content") : from;
  if (!name.is_string()) return {};
  Json out = special_token({}, name.get<std::string>());
  for (const char* const key : {"single_word", "lstrip", "rstrip", "normalized", "special"})
    if (const Json& flag = value_at(from, key); flag.is_boolean()) out[key] = flag;
  if (from.is_object()) out["special"] = special || out["special"] == true;
  return out;
}

// In the order in which they get ids.
std::vector<Json> tokens_of_files(const Json& settings, const Json& added, const std::string& what) {
  std::vector<Json> named, extra;
  std::set<Json> special;
  for (const std::string_view key : kTokenKeys)
    if (const Json token = added_token(value_at(settings, key), true); !token.is_null()) named.push_back(token);
  for (const auto& [key, value] : settings.items())
    if (key.ends_with("_token") && std::ranges::find(kTokenKeys, std::string_view(key)) == kTokenKeys.end())
      if (const Json token = added_token(value, true); !token.is_null()) named.push_back(token);
  if (const Json& list = value_at(settings, kExtra); list.is_structured())
    for (const Json& value : list)
      if (const Json token = added_token(value, true); !token.is_null())
        (list.is_object() ? named : extra).push_back(token);
  for (const std::vector<Json>* const list : {&named, &extra})
    for (const Json& token : *list) special.insert(token["content"]);

  std::map<int64_t, Json> listed;
  const Json& decoder = value_at(settings, kDecoder);
  for (const auto& [key, value] : decoder.items()) {
    int64_t id = -1;
    const Json token = added_token(value, special.contains(value_at(value, "content")));
    if (std::from_chars(key.data(), key.data() + key.size(), id).ec != std::errc() || !value.is_object() ||
        token.is_null())
      bad_input("{}{}: '{}': expected ids and tokens, got {} and {}", what, kConfig, kDecoder, shown(key),
                shown(value));
    listed[id] = token;
    if (!value.contains("special")) listed[id]["special"] = special.contains(token["content"]);
  }
  for (const auto& [name, value] : added.items()) {
    const auto id = natural(value);
    if (!id)
      bad_input("{}{}: the token {} has the id {}; expected an integer", what, kAdded, shown(name), shown(value));
    listed[*id] = special_token({}, name);
    listed[*id]["special"] = special.contains(name);
    listed[*id]["normalized"] = !special.contains(name);
  }
  std::vector<Json> out;
  for (const auto& token : listed) out.push_back(token.second);
  out.insert(out.end(), named.begin(), named.end());
  out.insert(out.end(), extra.begin(), extra.end());
  return out;
}

void add_ids(HubTokenizer::Files& files, const Json& model, const std::string& what) {
  Json settings = Json::object(), named = Json::object();
  if (files.contains(kGeneration)) settings = parse_json(files[kGeneration], what + kGeneration, JsonFile::others);
  for (const char* const key : kIds)
    if (const Json& id = value_at(model, key); value_at(settings, key).is_null() && !id.is_null() && !id.is_discarded())
      named[key] = id;
  if (!settings.is_object() || named.empty()) return;
  for (const auto& [key, value] : settings.items())
    if (!named.contains(key) && !value.is_discarded()) named[key] = value;
  files[kGeneration] = named.dump(2) + "\n";
}

// Adds the tokens missing from tokenizer.json; returns false if there are none.
bool add_missing(Json& file, const std::vector<Json>& tokens) {
  Json& list = file["added_tokens"];
  const Json& vocab = value_at(value_at(file, "model"), "vocab");
  std::set<Json> known;
  auto next = static_cast<int64_t>(vocab.size());
  for (const Json& token : list) {
    known.insert(value_at(token, "content"));
    next = std::max(next, natural(value_at(token, "id")).value_or(0) + 1);
  }
  const size_t before = list.size();
  for (Json token : tokens) {
    if (!known.insert(token["content"]).second) continue;
    const Json& id = value_at(vocab, token["content"].get_ref<const std::string&>());
    token["id"] = id.is_null() ? Json(next++) : id;
    list.push_back(std::move(token));
  }
  return list.size() > before;
}

bool lists(const Json& file, const Json& token) {
  const Json& list = value_at(file, "added_tokens");
  return std::any_of(list.begin(), list.end(),
                     [&](const Json& one) { return value_at(one, "content") == token["content"]; });
}

// The class specified by the settings or config.json, without the suffix "Fast".
std::string tokenizer_class(const Json& settings, const Json& model) {
  std::string name;
  for (const Json* const json : {&settings, &model})
    if (const Json& value = value_at(*json, "tokenizer_class"); name.empty() && value.is_string()) name = value;
  if (name.ends_with("Fast") && name != "PreTrainedTokenizerFast") name.resize(name.size() - 4);
  return name;
}

std::string model_class(const Json& model) {
  const Json& type = value_at(model, "model_type");
  if (type == "gpt2") return kGpt2;
  return type.is_string() && type.get_ref<const std::string&>().starts_with("qwen") ? kQwen : "";
}

// The components that a class defines itself; empty for a class that reads them from tokenizer.json.
Json class_rules(const std::string& name, const Json& settings) {
  const Json& prefix = value_at(settings, "add_prefix_space");
  const Json bytes = {{"type", "ByteLevel"}, {"add_prefix_space", prefix == Json(true)}};
  Json rules = {{"normalizer", nullptr}, {"pre_tokenizer", bytes}, {"decoder", {{"type", "ByteLevel"}}}};
  if (name == kGpt2 || name == "CodeGenTokenizer") return rules;
  if (name == kQwen) {
    const Json split = {{"type", "Split"}, {"pattern", {{"Regex", kQwenPattern}}}, {"behavior", "Isolated"}};
    rules["normalizer"] = {{"type", "NFC"}};
    rules["pre_tokenizer"] = {{"type", "Sequence"}, {"pretokenizers", {split, bytes}}};
    rules["pre_tokenizer"]["pretokenizers"][1]["use_regex"] = false;
    return rules;
  }
  if (name != kLlama) return {};
  const bool never = prefix == Json(false);
  const char* const scheme = never ? "never" : value_at(settings, "legacy") == Json(true) ? "always" : "first";
  rules["pre_tokenizer"] = {
      {"type", "Metaspace"}, {"replacement", hub::kMark}, {"prepend_scheme", scheme}, {"split", false}};
  Json decoders = {{{"type", "Replace"}, {"pattern", {{"String", hub::kMark}}}, {"content", " "}},
                   {{"type", "ByteFallback"}},
                   {{"type", "Fuse"}}};
  if (!never) decoders.push_back({{"type", "Strip"}, {"content", " "}, {"start", 1}, {"stop", 0}});
  rules["decoder"] = {{"type", "Sequence"}, {"decoders", std::move(decoders)}};
  return rules;
}

Json overriding_rules(const Json& file, const Json& settings, const Json& model) {
  const Json& type = value_at(model, "model_type");
  const std::string name = tokenizer_class(settings, model), own = model_class(model);
  const bool is_byte_level =
      (value_at(file, "pre_tokenizer").dump() + value_at(file, "decoder").dump()).find("\"ByteLevel\"") !=
      std::string::npos;
  if (type == "mistral" || type == "mixtral") return {};
  if (type != "qwen2" && name == kLlama && is_byte_level) return {};
  return class_rules(name.empty() || type == "qwen2" ? own : name, settings);
}

bool has_all(const Json& all, const Json& some) {
  if (!some.is_structured() || all.type() != some.type()) return all == some;
  if (some.is_array() && all.size() != some.size()) return false;
  for (const auto& [key, value] : some.items())
    if (!has_all(some.is_array() ? all[std::stoul(key)] : value_at(all, key), value)) return false;
  return true;
}

// Adds the class's defaults to the settings.
Json file_of_vocab(const std::filesystem::path& folder, const std::string& name, Json& settings) {
  constexpr std::array kLikeGpt2{kGpt2, "CodeGenTokenizer", "PreTrainedTokenizerFast", "TokenizersBackend"};
  if (name != kQwen && std::ranges::find(kLikeGpt2, name) == kLikeGpt2.end())
    bad_input("{}: without tokenizer.json 'tokenizer_class' must be {}, CodeGenTokenizer or {}, got {}",
              (folder / kConfig).string(), kGpt2, kQwen, name);
  for (const char* const key : {"unk_token", "eos_token", name == kQwen ? "pad_token" : "bos_token"})
    if (!settings.contains(key)) settings[key] = "<|endoftext|>";
  Json merges = Json::array();
  const std::string text = read_tokenizer_file(folder / "merges.txt");
  for (size_t at = 0; at < text.size();) {
    const size_t end = std::min(text.find('\n', at), text.size());
    std::string line = text.substr(at, end - at);
    if (line.ends_with('\r')) line.pop_back();
    if (!line.empty() && !line.starts_with("#version")) merges.push_back(std::move(line));
    at = end + 1;
  }
  Json file = class_rules(name == kQwen ? kQwen : kGpt2, settings);
  file["added_tokens"] = Json::array();
  file["model"] = {{"type", "BPE"},
                   {"vocab", parse_json(read_tokenizer_file(folder / kVocab), (folder / kVocab).string())},
                   {"merges", std::move(merges)}};
  return file;
}

Json ends_by_keys(const Json& file, const Json& settings) {
  Json single = Json::array({{{"Sequence", {{"id", "A"}, {"type_id", 0}}}}}), ids = Json::object();
  for (const std::string name : {"bos_token", "eos_token"}) {
    const Json token = added_token(value_at(settings, name), true);
    if (token.is_null() || value_at(settings, "add_" + name) != Json(true)) continue;
    for (const Json& one : file["added_tokens"])
      if (one["content"] == token["content"])
        ids[one["content"].get<std::string>()] = {{"id", one["content"]}, {"ids", {one["id"]}}};
    Json end = {{"SpecialToken", {{"id", token["content"]}, {"type_id", 0}}}};
    single.insert(name == "bos_token" ? single.begin() : single.end(), std::move(end));
  }
  return {{"type", "TemplateProcessing"}, {"single", std::move(single)}, {"special_tokens", std::move(ids)}};
}

}  // namespace

nlohmann::json hub::joined_settings(const HubTokenizer::Files& files, const std::string& what) {
  Json out = Json::object();
  for (const char* const name : {kConfig, kNames}) {
    if (out.contains(kDecoder)) break;
    const Json read = read_json(files, name, what);
    for (const auto& [key, value] : read.items()) {
      Json& to = out[key];
      if (key == kExtra && to.is_array() && value.is_array())
        to.insert(to.end(), value.begin(), value.end());
      else
        to = value;
    }
    if (is_nothing(value_at(out, kExtra)) && out.contains(kOldExtra)) out[kExtra] = out[kOldExtra];
  }
  return out;
}

std::unique_ptr<HubTokenizer> HubTokenizer::load(const std::filesystem::path& folder,
                                                 const std::optional<std::string>& text) {
  const std::string what = folder.string() + "/";
  std::optional<hub::File> file;
  if (text) file.emplace(*text, what + kTokenizer);
  if (file && file->json.is_object() && file->json.contains("format")) return nullptr;
  Files files;
  for (const char* const name : {kConfig, kNames, kTemplate, kGeneration, kAdded, kModel})
    if (is_there(folder / name)) files.emplace(name, read_tokenizer_file(folder / name));
  Json settings = hub::joined_settings(files, what);
  const Json added = settings.contains(kDecoder) ? Json() : read_json(files, kAdded, what);
  const Json model = files.contains(kModel) ? parse_json(files[kModel], what + kModel, JsonFile::others) : Json();
  if (!text) {
    std::string name = tokenizer_class(settings, model);
    if (name.empty() && (name = model_class(model)).empty()) name = kGpt2;
    if (name == kGpt2 && !files.contains(kConfig) && !files.contains(kNames) && added.empty()) return nullptr;
    Json made = file_of_vocab(folder, name, settings);
    add_missing(made, tokens_of_files(settings, added, what));
    made["post_processor"] = ends_by_keys(made, settings);
    files[kTokenizer] = made.dump() + "\n";
    Json valid = Json::object();
    for (const auto& [key, value] : settings.items())
      if (value.dump().find("<discarded>") == std::string::npos) valid[key] = value;
    files[kConfig] = valid.dump(2) + "\n", files.erase(kNames);
  } else {
    files[kTokenizer] = *text;
    const std::vector<Json> tokens = tokens_of_files(settings, added, what);
    const Json rules = overriding_rules(file->json, settings, model);
    const bool differs = !rules.is_null() && !has_all(file->json, rules);
    const bool lacks = value_at(file->json, "added_tokens").is_array() &&
                       !std::ranges::all_of(tokens, [&](const Json& token) { return lists(file->json, token); });
    if (differs || lacks) {
      Json full = parse_json(*text, what + kTokenizer, JsonFile::others);
      if (differs) full.update(rules);
      if (differs && rules["pre_tokenizer"]["type"] == "Metaspace") full["model"]["byte_fallback"] = true;
      if ((lacks && add_missing(full, tokens)) || differs) files[kTokenizer] = full.dump() + "\n";
    }
  }
  if (files.contains(kModel)) add_ids(files, model, what);
  files.erase(kAdded), files.erase(kModel);
  if (!text || files[kTokenizer] != *text) file.emplace(files[kTokenizer], what + kTokenizer);
  return std::make_unique<HubTokenizer>(std::move(files), *file, what);
}

}  // namespace tessera
