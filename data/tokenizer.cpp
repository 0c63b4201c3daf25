// Tokenizer choice, chunked encoding, and streamed decoding.
#include "data/tokenizer.h"

#include <fmt/ranges.h>
#include <xxhash.h>

#include <algorithm>
#include <nlohmann/json.hpp>

#include "base/bad_input.h"
#include "base/files.h"
#include "base/json.h"
#include "base/utf8.h"
#include "data/tokenizer/described.h"

namespace tessera {
namespace {

HubTokenizer hub_from_json(nlohmann::json& json, const std::string& what) {
  nlohmann::json& files = json["files"];
  if (!files.is_object() || !files.contains("tokenizer.json"))
    bad_input("{}: the key 'files' must be an object with a 'tokenizer.json'", what);
  HubTokenizer::Files texts;
  for (auto& [name, text] : files.items()) {
    if (!HubTokenizer::is_file(name) || !text.is_string())
      bad_input("{}: 'files' contains '{}', which is not a tokenizer file", what, name);
    texts.emplace(name, std::move(text.get_ref<std::string&>()));
  }
  return {std::move(texts), what + ": "};
}

std::unique_ptr<Tokenizer> make_tokenizer(nlohmann::json json, const std::string& what) {
  if (value_at(json, "format") != kTokenizerFormat)
    bad_input("{}: not a tokenizer (the key 'format' must be \"{}\")", what, kTokenizerFormat);
  if (value_at(json, "version") != 1) bad_input("{}: the key 'version' must be 1", what);
  const nlohmann::json& kind = value_at(json, "kind");
  const auto expect_keys = [&](size_t keys) {
    if (json.size() != keys) bad_input("{}: {} keys; expected {}", what, json.size(), keys);
  };
  if (kind == "char") {
    auto tokenizer = std::make_unique<CharTokenizer>(CharTokenizer::from_json(json, what));
    expect_keys(4);
    return tokenizer;
  }
  if (kind == "bpe") {
    for (const char* const key : {"vocab.json", "merges.txt"})
      if (!value_at(json, key).is_string()) bad_input("{}: the key '{}' must be a string", what, key);
    expect_keys(5);
    return std::make_unique<BpeTokenizer>(BpeTokenizer::parse_files(json["vocab.json"].get_ref<const std::string&>(),
                                                                    json["merges.txt"].get_ref<const std::string&>(),
                                                                    what + ": vocab.json", what + ": merges.txt"));
  }
  if (kind == "hub") {
    expect_keys(4);
    return std::make_unique<HubTokenizer>(hub_from_json(json, what));
  }
  if (kind != "bytes") bad_input("{}: the key 'kind' must be \"char\", \"bytes\", \"bpe\" or \"hub\"", what);
  expect_keys(3);
  return std::make_unique<ByteTokenizer>();
}

// The embedding of a rarer pair would hardly be trained.
constexpr int64_t kMinCount = 16;

bool is_builtin(std::string_view name) { return name == "char" || name == "bytes" || name == "bpe"; }

std::unique_ptr<Tokenizer> load_folder(std::string_view name) {
  if (!names_directory(name))
    throw Error(fmt::format("`tokenizer` '{}': expected char, bytes, bpe, or a tokenizer's directory", name));
  return Tokenizer::open_folder(name);
}

bool is_blank(char c) { return c == ' ' || (c >= '\t' && c <= '\r'); }

constexpr size_t kContext = 2048;

// A position near the end of a text where it can be split, or 0. If `anywhere`, any character boundary qualifies;
// otherwise `may_cut` decides on boundaries between white space and another character, given a few thousand bytes on
// both sides.
template <class MayCut>
size_t place_to_cut(std::string_view text, bool anywhere, const MayCut& may_cut) {
  size_t at = text.size() - kContext;
  if (anywhere) {
    for (int i = 0; i < 3 && (static_cast<uint8_t>(text[at]) & 0xC0u) == 0x80u; ++i) --at;
    return at;
  }
  for (int tries = 500; at > kContext && tries > 0; --at)
    if (is_blank(text[at]) != is_blank(text[at - 1]))
      if (--tries; may_cut(text.substr(at - kContext, kContext), text.substr(at, kContext))) return at;
  return 0;
}

template <class MayCut, class F>
void take_chunks(std::string& waiting, size_t chunk, bool anywhere, const std::string& what, const MayCut& may_cut,
                 const F& f) {
  while (waiting.size() >= chunk) {
    const size_t at = place_to_cut(waiting, anywhere, may_cut);
    if (at == 0 && waiting.size() < 8 * chunk) return;
    if (at == 0)
      bad_input(
          "{}: no position in {} bytes where the text can be split without changing its tokens; expected documents, "
          "JSON lines of {{\"text\": ...}}",
          what, waiting.size());
    f(std::string_view(waiting).substr(0, at));
    waiting.erase(0, at);
  }
}

std::unique_ptr<Tokenizer> make_named(const TokenizerChoice& choice, const std::string& what, const TextWalk& text) {
  const std::string_view name = choice.chosen();
  if (name == "bytes") return std::make_unique<ByteTokenizer>();
  if (!choice.learns()) return load_folder(name);
  const bool characters = name == "char";
  // No piece of GPT-2's pattern contains white space after another character, so splitting there needs no check.
  const auto can_split = [](std::string_view left, std::string_view right) {
    size_t at = last_character(left);
    return is_blank(right.front()) && !is_white_space(next_code_point(left, at).value_or(0xFFFD));
  };
  const auto learn = [&](const auto& f) {
    std::string waiting;
    text([&](std::string_view chunk, bool held) {
      if (held && !characters) return;
      waiting += chunk;
      take_chunks(waiting, size_t{8} << 20, characters, what, can_split, f);
    });
    f(waiting);
  };
  if (characters) return std::make_unique<CharTokenizer>(CharTokenizer::from_chunks(learn, what));
  WordCounts counts;
  learn([&](std::string_view chunk) { counts.add(chunk); });
  if (counts.forgotten() > 0 && choice.note)
    choice.note(
        fmt::format("{}: more than {} distinct words; those with {} or fewer occurrences were dropped during counting",
                    what, WordCounts::kMax, counts.forgotten()));
  BpeTraining training{.vocab_size = choice.vocab_size, .min_count = kMinCount};
  if (choice.progress)
    training.progress = [&](int64_t made) {
      choice.progress(
          fmt::format("training a byte-level BPE tokenizer: {} of at most {} tokens", made, choice.vocab_size));
    };
  return std::make_unique<BpeTokenizer>(train_bpe(std::move(counts), training));
}

}  // namespace

std::string Tokenizer::identity() const {
  return fmt::format("{} {} {} {}", files().at("tokenizer.json"), fmt::join(encode_with("", {.add_ends = true}), " "),
                     bos().value_or(-1), document_end().value_or(-1));
}

std::string Tokenizer::generation_config() const {
  nlohmann::json out = nlohmann::json::object();
  if (bos()) out["bos_token_id"] = *bos();
  if (document_end()) out["eos_token_id"] = *document_end();
  return out.dump(2) + "\n";
}

std::vector<int32_t> generation_ends(const Tokenizer& tokenizer) {
  const nlohmann::json settings = parse_json(tokenizer.generation_config(), "generation_config.json");
  const nlohmann::json& ends = value_at(settings, "eos_token_id");
  std::vector<int32_t> out;
  for (const nlohmann::json& id : ends.is_array() ? ends : nlohmann::json::array({ends})) {
    if (id.is_null()) continue;
    if (!id.is_number_integer() || id > INT32_MAX)
      bad_input("generation_config.json: 'eos_token_id' must be a token id or a list of ids, not {}", shown(ends));
    out.push_back(id.get<int32_t>());
  }
  return out;
}

std::unique_ptr<Tokenizer> Tokenizer::from_json(std::string_view text, const std::string& what) {
  return make_tokenizer(parse_json(text, what), what);
}

std::unique_ptr<Tokenizer> Tokenizer::load(const std::filesystem::path& file) {
  return from_json(read_tokenizer_file(file), file.string());
}

std::unique_ptr<Tokenizer> Tokenizer::open_folder(const std::filesystem::path& folder) {
  const std::filesystem::path file = folder / "tokenizer.json";
  if (!is_there(file)) {
    if (!is_there(folder / "vocab.json"))
      bad_input("{}: no tokenizer; expected tokenizer.json, or vocab.json and merges.txt{}", folder.string(),
                is_there(folder / "tokenizer.model")
                    ? "; tokenizer.model is not supported: convert it to tokenizer.json with "
                      "AutoTokenizer.from_pretrained(FOLDER).save_pretrained(NEW) of transformers"
                    : "");
    if (auto hub = HubTokenizer::load(folder, std::nullopt)) return hub;
    return std::make_unique<BpeTokenizer>(BpeTokenizer::load_files(folder));
  }
  const std::string text = read_tokenizer_file(file);
  if (auto hub = HubTokenizer::load(folder, text)) return hub;
  return from_json(text, file.string());
}

std::unique_ptr<Tokenizer> make_tokenizer(const TokenizerChoice& choice, const std::string& what,
                                          const TextWalk& text) {
  return with_tokens(make_named(choice, what, text), choice);
}

void Tokenizer::count_special(std::string_view, std::map<std::string, int64_t>&) const {}

std::string special_note(const std::map<std::string, int64_t>& counts, bool as_tokens) {
  int64_t sum = 0;
  std::vector<std::string> names;
  for (const auto& [name, count] : counts) sum += count, names.push_back(name);
  if (sum == 0) return "";
  return fmt::format("{} {} of {} in the data: read as {}", sum, sum == 1 ? "occurrence" : "occurrences",
                     fmt::join(std::span(names).first(std::min<size_t>(names.size(), 5)), ", "),
                     as_tokens ? "special tokens" : "text; `special` reads them as special tokens");
}

TextEncoder::TextEncoder(const Tokenizer& tokenizer, std::string what, Each each, bool add_ends, size_t chunk,
                         bool special)
    : tokenizer_(tokenizer), what_(std::move(what)), each_(std::move(each)), chunk_(chunk), special_(special) {
  if (!add_ends) return;
  const std::vector<int32_t> ends = tokenizer.encode_with("", {.add_ends = true});
  const std::span<const int32_t> before = tokenizer.beginning();
  after_.assign(ends.begin() + std::ssize(before), ends.end());
  each_(before);
}

bool TextEncoder::may_cut(std::string_view left, std::string_view right) const {
  const EncodeOptions inside{.special_in_text = special_, .begins = false, .first = false};
  std::vector<int32_t> separate = tokenizer_.encode_with(left, inside);
  const std::vector<int32_t> after = tokenizer_.encode_with(right, inside);
  separate.insert(separate.end(), after.begin(), after.end());
  return separate == tokenizer_.encode_with({left.data(), left.size() + right.size()}, inside);
}

void TextEncoder::encode(std::string_view chunk) {
  tokenizer_.count_special(chunk, names_);
  each_(tokenizer_.encode_with(
      chunk, {.special_in_text = special_, .begins = done_ == 0, .first = done_ == 0, .offset = done_}));
  done_ += std::ssize(chunk);
}

void TextEncoder::add(std::string_view text) {
  waiting_ += text;
  take_chunks(
      waiting_, chunk_, tokenizer_.kind() == "char" || tokenizer_.kind() == "bytes", what_,
      [&](std::string_view left, std::string_view right) { return may_cut(left, right); },
      [&](std::string_view chunk) { encode(chunk); });
}

void TextEncoder::finish() {
  encode(waiting_);
  each_(after_);
}

std::unique_ptr<Tokenizer> with_tokens(std::unique_ptr<Tokenizer> base, const TokenizerChoice& choice) {
  if (choice.added.empty() && choice.end.empty()) return base;
  if (base->kind() == "char")
    throw Error(fmt::format("`{}`: not supported with `tokenizer` char; expected `tokenizer` bytes, bpe or a directory",
                            choice.added.empty() ? "end" : "add_tokens"));
  using Json = nlohmann::json;
  HubTokenizer::Files files = base->files();
  Json file = parse_json(files.at("tokenizer.json"), "tokenizer.json");
  Json& list = file["added_tokens"];
  if (list.is_null()) list = Json::array();
  const Json& vocab = value_at(value_at(file, "model"), "vocab");
  auto next = static_cast<uint64_t>(base->vocab_size());
  // Makes the added token with this name special.
  const auto find = [&](const std::string& name) {
    const auto found =
        std::find_if(list.begin(), list.end(), [&](const Json& token) { return value_at(token, "content") == name; });
    if (found != list.end()) (*found)["special"] = true, (*found)["normalized"] = false;
    return found;
  };
  for (const std::string& name : choice.added) {
    if (name.empty() || find_invalid_utf8(name) != std::string::npos)
      throw Error(fmt::format("`add_tokens`: expected comma-separated names, got '{}'", name));
    if (find(name) != list.end()) continue;
    list.push_back(special_token(vocab.contains(name) ? vocab[name] : Json(next++), name));
  }
  if (!choice.end.empty()) {
    const auto found = find(choice.end);
    std::vector<std::string> known;
    for (const Json& token : list) known.push_back(value_at(token, "content").get<std::string>());
    if (found == list.end())
      throw Error(
          fmt::format("`end`: expected one of the tokenizer's {} special tokens (`add_tokens` adds more), got '{}'{}",
                      known.size(), choice.end, did_you_mean(choice.end, known)));
    for (const char* const name : {"tokenizer_config.json", "special_tokens_map.json", "generation_config.json"}) {
      const auto text = files.find(name);
      if (text == files.end()) continue;
      Json json = name == std::string_view("generation_config.json") ? Json{{"eos_token_id", (*found)["id"]}}
                                                                     : Json{{"eos_token", choice.end}};
      const Json all = parse_json(text->second, name, JsonFile::others);
      for (const auto& [key, value] : all.items())
        if (!json.contains(key) && !value.is_discarded()) json[key] = value;
      text->second = json.dump(2) + "\n";
    }
  }
  files["tokenizer.json"] = file.dump() + "\n";
  return std::make_unique<HubTokenizer>(std::move(files), "");
}

void check_in_table(std::span<const int32_t> tokens, int64_t rows, const Tokenizer& tokenizer,
                    const std::string& what) {
  const auto max = std::ranges::max_element(tokens);
  if (rows > 0 && max != tokens.end() && *max >= rows)
    throw InputError(fmt::format(
        "{}: token {}{} is outside the model's embedding table of {} rows", what, *max,
        *max < tokenizer.vocab_size() ? fmt::format(", '{}',", tokenizer.decode(std::span(&*max, 1))) : "", rows));
}

std::string cache_name(const TokenizerChoice& choice) {
  const std::string_view name = choice.chosen();
  const auto hashed = [](const std::string& all) {
    return fmt::format("{:016x}", XXH3_64bits(all.data(), all.size()));
  };
  const bool own = choice.added.empty() && choice.end.empty();
  const std::string more =
      (choice.special ? "-special" : "") +
      std::string(own ? "" : "-" + hashed(fmt::format("{}\n{}", fmt::join(choice.added, ","), choice.end)));
  if (name == "bpe") return fmt::format("bpe{}{}", choice.vocab_size, more);
  return (is_builtin(name) ? std::string(name) : hashed(load_folder(name)->identity())) + more;
}

void require_folder(const std::string& file, const TokenizerChoice& choice) {
  if (choice.name.empty() || is_builtin(choice.name))
    throw Error(fmt::format(
        "`tokenizer`: expected the directory of the tokenizer.json, or the vocab.json and merges.txt, that {} was made "
        "with, got {}",
        file, choice.name.empty() ? "none" : "'" + choice.name + "'"));
}

bool fits(const TokenizerChoice& choice, const Tokenizer& tokenizer) {
  if (choice.name.empty()) return true;
  if (is_builtin(choice.name)) return choice.name == tokenizer.kind();
  return load_folder(choice.name)->identity() == tokenizer.identity();
}

std::string StreamDecoder::shown(std::string_view bytes) const {
  return broken_ == Broken::escaped ? escape_broken(bytes) : replace_broken(bytes);
}

std::string StreamDecoder::add(int32_t token) {
  waiting_ += tokenizer_->token_bytes(token);
  size_t pending = std::min<size_t>(3, waiting_.size());  // a character has at most four bytes
  while (pending > 0 && begun_character(waiting_, waiting_.size() - pending) != pending) --pending;
  std::string out = shown(std::string_view(waiting_).substr(0, waiting_.size() - pending));
  waiting_.erase(0, waiting_.size() - pending);
  return out;
}

std::string StreamDecoder::end() {
  std::string out = shown(waiting_);
  waiting_.clear();
  return out;
}

}  // namespace tessera
