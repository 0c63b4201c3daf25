// The character and byte tokenizers, and reading any from its file.
#include "data/tokenizer.h"

#include <fmt/format.h>

#include <array>
#include <nlohmann/json.hpp>
#include <set>

#include "data/bpe/bpe_tokenizer.h"
#include "data/hub_tokenizer/hub_tokenizer.h"
#include "data/json.h"
#include "data/utf8.h"
#include "tensor/error.h"

namespace tessera {
namespace {

bool is_scalar(uint64_t c) { return c <= 0x10FFFF && (c < 0xD800 || c > 0xDFFF); }

int32_t checked(int32_t token, int64_t vocab, std::string_view kind) {
  if (token < 0 || token >= vocab)
    throw Error(fmt::format("token {} is outside the {} tokenizer's vocabulary of {}", token, kind, vocab));
  return token;
}

CharTokenizer chars_from_json(const nlohmann::json& json, const std::string& what) {
  if (!json.contains("characters") || !json["characters"].is_array())
    throw InputError(fmt::format("{}: the key 'characters' must be a list of code points", what));
  std::vector<char32_t> characters;
  for (const nlohmann::json& c : json["characters"]) {
    if (!c.is_number_unsigned() || !is_scalar(c.get<uint64_t>()))
      throw InputError(fmt::format("{}: 'characters' holds {}, which is no Unicode code point", what, c.dump()));
    if (!characters.empty() && c.get<char32_t>() <= characters.back())
      throw InputError(fmt::format("{}: 'characters' must ascend; {} follows {}", what, c.dump(),
                                   static_cast<uint32_t>(characters.back())));
    characters.push_back(c.get<char32_t>());
  }
  if (characters.empty()) throw InputError(fmt::format("{}: 'characters' is empty", what));
  return CharTokenizer(std::move(characters));
}

HubTokenizer hub_from_json(const nlohmann::json& json, const std::string& what) {
  const nlohmann::json files = json.value("files", nlohmann::json());
  if (!files.is_object() || !files.contains("tokenizer.json"))
    throw InputError(fmt::format("{}: the key 'files' must be an object with a 'tokenizer.json'", what));
  HubTokenizer::Files texts;
  for (const auto& [name, text] : files.items()) {
    if (!HubTokenizer::is_file(name) || !text.is_string())
      throw InputError(fmt::format("{}: 'files' has '{}', which is no text of a tokenizer's file", what, name));
    texts.emplace(name, text.get<std::string>());
  }
  const nlohmann::json main = parse_json(texts.at("tokenizer.json"), what + ": tokenizer.json");
  return {std::move(texts), main, what + ": "};
}

std::unique_ptr<Tokenizer> tokenizer_of(const nlohmann::json& json, const std::string& what) {
  if (!json.is_object() || json.value("format", nlohmann::json()) != kTokenizerFormat)
    throw InputError(fmt::format("{}: not a tokenizer (the key 'format' must be \"{}\")", what, kTokenizerFormat));
  if (json.value("version", nlohmann::json()) != 1)
    throw InputError(fmt::format("{}: the key 'version' must be 1", what));
  const nlohmann::json kind = json.value("kind", nlohmann::json());
  const auto expect_keys = [&](size_t keys) {
    if (json.size() != keys) throw InputError(fmt::format("{}: {} keys; expected {}", what, json.size(), keys));
  };
  if (kind == "char") {
    auto tokenizer = std::make_unique<CharTokenizer>(chars_from_json(json, what));
    expect_keys(4);
    return tokenizer;
  }
  if (kind == "bpe") {
    for (const char* const key : {"vocab.json", "merges.txt"})
      if (!json.value(key, nlohmann::json()).is_string())
        throw InputError(fmt::format("{}: the key '{}' must be a string", what, key));
    expect_keys(5);
    return std::make_unique<BpeTokenizer>(BpeTokenizer::parse_files(json["vocab.json"].get_ref<const std::string&>(),
                                                                    json["merges.txt"].get_ref<const std::string&>(),
                                                                    what + ": vocab.json", what + ": merges.txt"));
  }
  if (kind == "hub") {
    expect_keys(4);
    return std::make_unique<HubTokenizer>(hub_from_json(json, what));
  }
  if (kind != "bytes")
    throw InputError(fmt::format("{}: the key 'kind' must be \"char\", \"bytes\", \"bpe\" or \"hub\"", what));
  expect_keys(3);
  return std::make_unique<ByteTokenizer>();
}

}  // namespace

std::unique_ptr<Tokenizer> Tokenizer::from_json(std::string_view text, const std::string& what) {
  return tokenizer_of(parse_json(text, what), what);
}

std::unique_ptr<Tokenizer> Tokenizer::load(const std::filesystem::path& file) {
  return from_json(read_tokenizer_file(file), file.string());
}

std::unique_ptr<Tokenizer> Tokenizer::open_folder(const std::filesystem::path& folder) {
  const std::filesystem::path file = folder / "tokenizer.json";
  std::error_code error;
  if (!std::filesystem::exists(file, error)) {
    if (!std::filesystem::exists(folder / "vocab.json", error))
      throw InputError(
          fmt::format("{}: no tokenizer; expected tokenizer.json, or vocab.json and merges.txt", folder.string()));
    return std::make_unique<BpeTokenizer>(BpeTokenizer::load_files(folder));
  }
  std::string text = read_tokenizer_file(file);
  const nlohmann::json json = parse_json(text, file.string());
  if (json.is_object() && json.contains("format")) return tokenizer_of(json, file.string());
  return HubTokenizer::load(folder, std::move(text), json);
}

CharTokenizer::CharTokenizer(std::vector<char32_t> characters) : characters_(std::move(characters)) {
  if (characters_.empty()) throw InputError("a char tokenizer needs at least one character");
  index_.reserve(characters_.size());
  for (size_t i = 0; i < characters_.size(); ++i) {
    if (!is_scalar(characters_[i]) || (i > 0 && characters_[i] <= characters_[i - 1]))
      throw InputError(fmt::format("a char tokenizer's characters must ascend; number {} is {}", i,
                                   static_cast<uint32_t>(characters_[i])));
    index_[characters_[i]] = static_cast<int32_t>(i);
  }
}

CharTokenizer CharTokenizer::of_text(std::string_view text, const std::string& what) {
  std::set<char32_t> found;
  char32_t last = 0x110000;  // none: most characters of a text are known already
  std::array<bool, 128> ascii{};
  for (size_t position = 0; position < text.size();) {
    const size_t at = position;
    const std::optional<char32_t> c = next_code_point(text, position);
    if (!c)
      throw InputError(fmt::format(
          "{} is not UTF-8 (invalid byte 0x{:02x} at offset {}), which `tokenizer` char needs; `tokenizer` bytes takes "
          "any encoding",
          what, static_cast<uint8_t>(text[at]), at));
    if (*c < 128) {
      ascii[*c] = true;
    } else if (*c != last) {
      found.insert(last = *c);
    }
  }
  for (char32_t c = 0; c < 128; ++c)
    if (ascii[c]) found.insert(c);
  if (found.empty()) throw InputError(fmt::format("{} is empty; expected a text", what));
  return CharTokenizer({found.begin(), found.end()});
}

std::vector<int32_t> CharTokenizer::encode(std::string_view text) const {
  std::vector<int32_t> tokens;
  tokens.reserve(text.size());
  for (size_t position = 0; position < text.size();) {
    const size_t at = position;
    const std::optional<char32_t> c = next_code_point(text, position);
    if (!c) throw Error(fmt::format("the text is not UTF-8: invalid byte at offset {}", at));
    const auto known = index_.find(*c);
    if (known == index_.end())
      throw Error(fmt::format("the character '{}' (U+{:04X}) at byte {} is not among the {} of the tokenizer",
                              *c < 0x20 ? std::string_view("?") : text.substr(at, position - at),
                              static_cast<uint32_t>(*c), at, vocab_size()));
    tokens.push_back(known->second);
  }
  return tokens;
}

std::string CharTokenizer::decode(std::span<const int32_t> tokens) const {
  std::string text;
  for (const int32_t t : tokens) append_utf8(text, characters_[static_cast<size_t>(checked(t, vocab_size(), "char"))]);
  return text;
}

std::string CharTokenizer::to_json() const {
  const std::vector<uint32_t> points(characters_.begin(), characters_.end());
  return nlohmann::json{{"format", kTokenizerFormat}, {"version", 1}, {"kind", "char"}, {"characters", points}}.dump() +
         "\n";
}

std::vector<int32_t> ByteTokenizer::encode(std::string_view text) const {
  std::vector<int32_t> tokens(text.size());
  for (size_t i = 0; i < text.size(); ++i) tokens[i] = static_cast<uint8_t>(text[i]);
  return tokens;
}

std::string ByteTokenizer::decode(std::span<const int32_t> tokens) const {
  std::string text;
  for (const int32_t t : tokens) text.push_back(static_cast<char>(checked(t, 256, "bytes")));
  return text;
}

std::string ByteTokenizer::to_json() const {
  return nlohmann::json{{"format", kTokenizerFormat}, {"version", 1}, {"kind", "bytes"}}.dump() + "\n";
}

}  // namespace tessera
