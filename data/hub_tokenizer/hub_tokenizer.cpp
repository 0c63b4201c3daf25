// Reading the files of a Hugging Face tokenizer, and decoding.
#include "data/hub_tokenizer/hub_tokenizer.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <nlohmann/json.hpp>

#include "data/files.h"
#include "data/hub_tokenizer/parse.h"
#include "data/json.h"
#include "data/utf8.h"

namespace tessera {

using hub::at;
using hub::Json;
using hub::shown;

namespace {

constexpr const char *kTokenizer = "tokenizer.json", *kConfig = "tokenizer_config.json",
                     *kNames = "special_tokens_map.json", *kTemplate = "chat_template.jinja";
constexpr uintmax_t kMostBytes = 100'000'000;  // the largest known has a third
constexpr std::array kFiles{kTokenizer, kConfig, kNames, kTemplate};

// The text of a chat template: one string, or the one called "default" of several.
std::string template_of(const Json& value, const std::string& what) {
  if (value.is_null()) return "";
  if (value.is_string()) return value.get<std::string>();
  if (value.is_array())
    for (const Json& named : value)
      if (at(named, "name") == "default" && at(named, "template").is_string())
        return at(named, "template").get<std::string>();
  throw InputError(fmt::format("{}: 'chat_template' must be a text, or a list with one named default", what));
}

}  // namespace

HubTokenizer::HubTokenizer(Files files, const Json& json, const std::string& what)
    : files_(std::move(files)), d_(hub::describe(json, what + kTokenizer)) {
  for (const hub::AddedToken& t : d_.added) {
    if (!names_.emplace(t.content, t.token).second)
      throw InputError(fmt::format("{}{}: the added token '{}' appears twice", what, kTokenizer, t.content));
    (t.normalized ? normal_ : written_).add(t.normalized ? normalized(t.content, true) : t.content, t.token, t.special);
  }
  read_config(what);
}

std::string read_tokenizer_file(const std::filesystem::path& file) {
  std::error_code error;
  const auto size = std::filesystem::file_size(file, error);
  if (!error && size > kMostBytes)
    throw InputError(
        fmt::format("{} has {} bytes; expected a tokenizer's at most {}", file.string(), size, kMostBytes));
  return read_file(file);
}

bool HubTokenizer::is_file(std::string_view name) {
  return std::find(kFiles.begin(), kFiles.end(), name) != kFiles.end();
}

std::unique_ptr<HubTokenizer> HubTokenizer::load(const std::filesystem::path& folder, std::string text,
                                                 const Json& json) {
  Files files{{kTokenizer, std::move(text)}};
  std::error_code error;
  for (const char* const name : {kConfig, kNames, kTemplate})
    if (std::filesystem::exists(folder / name, error)) files.emplace(name, read_tokenizer_file(folder / name));
  return std::make_unique<HubTokenizer>(std::move(files), json, folder.string() + "/");
}

void HubTokenizer::read_config(const std::string& what) {
  for (const char* const name : {kNames, kConfig}) {  // the second is the newer and has the last word
    const auto file = files_.find(name);
    if (file == files_.end()) continue;
    const Json config = parse_json(file->second, what + name);
    if (!config.is_object()) throw InputError(what + name + ": expected one object");
    if (const auto token = named(config, "bos_token", what + name)) bos_ = token;
    if (const auto token = named(config, "eos_token", what + name)) eos_ = token;
    if (name == kConfig) chat_template_ = template_of(at(config, "chat_template"), what + name);
  }
  if (!eos_) eos_ = special("<|endoftext|>");
  const auto jinja = files_.find(kTemplate);
  if (jinja == files_.end()) return;
  if (find_invalid_utf8(jinja->second) != std::string::npos)
    throw InputError(fmt::format("{}{}: not UTF-8", what, kTemplate));
  chat_template_ = jinja->second;
}

// The token that a key names, as a string or as an added token's object.
std::optional<int32_t> HubTokenizer::named(const Json& config, const char* key, const std::string& what) const {
  const Json& value = at(config, key);
  if (value.is_null()) return {};
  const Json& name = value.is_object() ? at(value, "content") : value;
  if (!name.is_string()) throw InputError(fmt::format("{}: '{}' must name a token, not {}", what, key, shown(value)));
  if (const auto token = special(name.get_ref<const std::string&>())) return token;
  const auto found = d_.vocab.find(name.get_ref<const std::string&>());
  if (found == d_.vocab.end())
    throw InputError(fmt::format("{}: '{}' is {}, which is no token of {}", what, key, shown(name), kTokenizer));
  return found->second;
}

std::optional<int32_t> HubTokenizer::special(std::string_view name) const {
  const auto found = names_.find(name);
  return found == names_.end() ? std::nullopt : std::optional(found->second);
}

std::string HubTokenizer::bytes_of(int32_t token) const {
  if (token < 0 || token >= vocab_size())
    throw Error(fmt::format("token {} is outside the tokenizer's vocabulary of {}", token, vocab_size()));
  return d_.tokens[static_cast<size_t>(token)];
}

std::string HubTokenizer::decode(std::span<const int32_t> tokens) const {
  std::string out;
  for (size_t i = 0; i < tokens.size(); ++i) {
    out += bytes_of(tokens[i]);
    if (i == 0 && d_.strip == hub::Strip::marks_of_first) std::erase(out, ' ');
  }
  if (d_.strip == hub::Strip::space && out.starts_with(' ')) out.erase(0, 1);
  return out;
}

std::string HubTokenizer::to_json() const {
  return Json{{"format", kTokenizerFormat}, {"version", 1}, {"kind", "hub"}, {"files", files_}}.dump() + "\n";
}

}  // namespace tessera
