// Tessera's own tokenizers: descriptions, files, training.

#include <algorithm>
#include <cstdint>
#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <queue>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "base/bad_input.h"
#include "base/files.h"
#include "base/json.h"
#include "base/utf8.h"
#include "data/tokenizer/described.h"

namespace tessera {
namespace {

using Json = nlohmann::json;
using hub::Description;

std::string written(std::string_view kind, Json more = Json::object()) {
  more.update({{"format", kTokenizerFormat}, {"version", 1}, {"kind", kind}});
  return more.dump() + "\n";
}

bool is_scalar(uint64_t c) { return c <= 0x10FFFF && (c < 0xD800 || c > 0xDFFF); }

Description from_bytes() {
  Description d;
  for (int b = 0; b < 256; ++b) d.tokens.emplace_back(1, static_cast<char>(b));
  return d;
}

Description from_characters(const std::vector<char32_t>& characters) {
  Description d;
  for (const char32_t c : characters) append_utf8(d.tokens.emplace_back(), c);
  return d;
}

std::vector<std::string> parse_vocab(std::string_view text, const std::string& what) {
  const Json json = parse_json(text, what);
  if (!json.is_object()) throw InputError(what + ": expected an object that maps tokens to ids");
  std::vector<std::string> tokens(json.size());
  std::vector<bool> seen(json.size());
  for (const auto& [spelling, id] : json.items()) {
    if (!id.is_number_unsigned() || id.get<uint64_t>() >= tokens.size() || seen[id.get<size_t>()])
      bad_input("{}: the token '{}' has the id {}; expected each of 0 to {} once", what, spelling, id.dump(),
                tokens.size() - 1);
    seen[id.get<size_t>()] = true;
    tokens[id.get<size_t>()] = bpe::unspell(spelling).value_or(spelling);  // a special token may contain any character
  }
  return tokens;
}

int32_t find_token_id(const hub::Ids& ids, std::string_view spelling, const std::string& what, size_t line) {
  const std::optional<std::string> bytes = bpe::unspell(spelling);
  const int32_t found = bytes ? ids.find(*bytes) : -1;
  if (found < 0) bad_input("{}: line {}: '{}' is not a token of the vocabulary", what, line, spelling);
  return found;
}

std::vector<BpeTokenizer::Merge> parse_merges(std::string_view text, const std::vector<std::string>& tokens,
                                              const std::string& what) {
  hub::Ids ids;
  for (size_t i = 0; i < tokens.size(); ++i) ids.add(tokens[i], static_cast<int32_t>(i));
  std::vector<BpeTokenizer::Merge> merges;
  for (size_t line = 1; !text.empty(); ++line) {
    const size_t end = std::min(text.find('\n'), text.size());
    std::string_view row = text.substr(0, end);
    text.remove_prefix(std::min(end + 1, text.size()));
    if (row.ends_with('\r')) row.remove_suffix(1);  // not in any spelling of a byte
    if (line == 1 && row.starts_with("#version")) continue;
    const size_t space = row.find(' ');
    if (space == std::string_view::npos || row.find(' ', space + 1) != std::string_view::npos)
      bad_input("{}: line {}: expected two tokens separated by one space", what, line);
    merges.push_back(
        {find_token_id(ids, row.substr(0, space), what, line), find_token_id(ids, row.substr(space + 1), what, line)});
  }
  return merges;
}

// Byte-level BPE with GPT-2's pattern, which accepts any bytes.
Description from_merges(std::vector<std::string> tokens, const std::vector<BpeTokenizer::Merge>& merges,
                        const std::string& what) {
  Description d;
  d.tokens = std::move(tokens);
  d.any_bytes = d.byte_level = true;
  d.cuts = {bpe::Split::from_regex(bpe::kGpt2)};
  d.byte_tokens.assign(256, -1);
  for (size_t i = 0; i < d.tokens.size(); ++i) {
    if (d.tokens[i].empty()) bad_input("{}: token {} is empty", what, i);
    if (d.tokens[i].size() > 1) continue;
    int32_t& place = d.byte_tokens[static_cast<uint8_t>(d.tokens[i][0])];
    if (place >= 0) bad_input("{}: tokens {} and {} represent the same byte", what, place, i);
    place = static_cast<int32_t>(i);
  }
  for (size_t b = 0; b < 256; ++b)
    if (d.byte_tokens[b] < 0) bad_input("{}: no token for the byte 0x{:02x}; expected all 256 bytes", what, b);
  d.vocab.reserve(d.tokens.size());
  for (size_t i = 0; i < d.tokens.size(); ++i)
    if (!d.vocab.add(d.tokens[i], static_cast<int32_t>(i)))
      bad_input("{}: tokens {} and {} are the same, '{}'", what, d.vocab.find(d.tokens[i]), i, bpe::spell(d.tokens[i]));
  d.merges.reserve(merges.size());
  for (size_t rank = 0; rank < merges.size(); ++rank) {
    const auto [left, right] = merges[rank];
    for (const int32_t operand : {left, right})
      if (operand < 0 || operand >= std::ssize(d.tokens))
        bad_input("{}: merge {} uses the unknown token {}", what, rank, operand);
    const std::string joined = d.tokens[static_cast<size_t>(left)] + d.tokens[static_cast<size_t>(right)];
    const int32_t result = d.vocab.find(joined);
    if (result < 0) bad_input("{}: merge {} produces '{}', which is not a token", what, rank, bpe::spell(joined));
    if (!d.merges.add(merges[rank], result))
      bad_input("{}: merge {} (into '{}') appears twice", what, rank, bpe::spell(joined));
  }
  return d;
}

// For the libraries `tokenizers` and transformers (class names exist in versions 4 and 5). Decoded text is neither
// cleaned up nor joined with spaces.
std::map<std::string, std::string> library_files(const Tokenizer& tokenizer, const Json& vocab,
                                                 const Json& merges = Json::array(),
                                                 const std::vector<std::string>& special = {}) {
  Json file = Json::parse(R"({"version": "1.0", "truncation": null, "padding": null, "normalizer": null,
      "pre_tokenizer": null, "post_processor": null, "decoder": {"type": "Fuse"}, "added_tokens": [],
      "model": {"type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
                "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "ignore_merges": false}})");
  file["model"].update({{"vocab", vocab}, {"merges", merges}});
  for (const std::string& token : special) file["added_tokens"].push_back(special_token(vocab[token], token));
  if (tokenizer.kind() != "char")
    file["decoder"] = file["pre_tokenizer"] = {{"type", "ByteLevel"},
                                               {"add_prefix_space", false},
                                               {"trim_offsets", true},
                                               {"use_regex", tokenizer.kind() == "bpe"}};
  Json config = {{"tokenizer_class", "PreTrainedTokenizerFast"}, {"clean_up_tokenization_spaces", false}};
  if (const auto end = tokenizer.document_end()) config["eos_token"] = tokenizer.decode(std::span(&*end, 1));
  return {{"tokenizer.json", file.dump() + "\n"},
          {"tokenizer_config.json", config.dump(2) + "\n"},
          {"generation_config.json", tokenizer.generation_config()}};
}

constexpr int64_t kProgressEvery = 64;  // merges

struct Word {
  std::vector<int32_t> tokens;
  int64_t count;
};

struct Pair {
  int64_t count = 0;
  std::vector<int32_t> words;  // may contain the pair; ascending
};

// A count, and a pair's key with all bits inverted, so that a heap's top has the highest count, then the smallest pair.
using Candidate = std::pair<int64_t, uint64_t>;

BpeTokenizer::Merge from_key(uint64_t key) {
  return {static_cast<int32_t>(key >> 32), static_cast<int32_t>(key & 0xFFFFFFFF)};
}

class Trainer {
 public:
  explicit Trainer(const WordCounts::Counts& counts) {
    for (const uint8_t byte : bpe::bytes_in_order()) add_token(std::string(1, static_cast<char>(byte)));
    for (const auto& [word, count] : counts) {
      words_.push_back({{}, count});
      for (const char byte : word) words_.back().tokens.push_back(ids_.at(std::string(1, byte)));
    }
    for (size_t w = 0; w < words_.size(); ++w) add_pairs(static_cast<int32_t>(w), nullptr);
    for (const auto& [key, pair] : pairs_) heap_.push({pair.count, ~key});
  }

  bool step(int64_t min_count) {
    while (!heap_.empty()) {
      const auto [count, inverted] = heap_.top();
      heap_.pop();
      const Pair& pair = pairs_.at(~inverted);
      if (count != pair.count) {  // decreased since it was pushed
        if (pair.count > 0) heap_.push({pair.count, inverted});
        continue;
      }
      if (count >= min_count) merge(~inverted);
      return count >= min_count;
    }
    return false;
  }

  int64_t made() const { return std::ssize(tokens_); }
  BpeTokenizer finish() && { return {std::move(tokens_), std::move(merges_), "the trained tokenizer"}; }

 private:
  int32_t add_token(const std::string& bytes) {
    const auto [place, added] = ids_.emplace(bytes, static_cast<int32_t>(tokens_.size()));
    if (added) tokens_.push_back(bytes);
    return place->second;
  }

  void add_pairs(int32_t w, std::vector<uint64_t>* changed) {
    const Word& word = words_[static_cast<size_t>(w)];
    for (size_t i = 0; i + 1 < word.tokens.size(); ++i) {
      const uint64_t key = bpe::pair_key(word.tokens[i], word.tokens[i + 1]);
      Pair& pair = pairs_[key];
      pair.count += word.count;
      if (pair.words.empty() || pair.words.back() != w) pair.words.push_back(w);
      if (changed != nullptr) changed->push_back(key);
    }
  }
  void take_pairs(const Word& word) {
    for (size_t i = 0; i + 1 < word.tokens.size(); ++i)
      pairs_.at(bpe::pair_key(word.tokens[i], word.tokens[i + 1])).count -= word.count;
  }

  void merge(uint64_t key) {
    const auto [left, right] = from_key(key);
    const int32_t result = add_token(tokens_[static_cast<size_t>(left)] + tokens_[static_cast<size_t>(right)]);
    merges_.push_back({left, right});
    std::vector<int32_t> words = std::move(pairs_.at(key).words);
    pairs_.at(key).words.clear();
    std::ranges::sort(words);
    words.erase(std::unique(words.begin(), words.end()), words.end());
    std::vector<uint64_t> changed;
    for (const int32_t w : words) merge_in(w, {left, right}, result, changed);
    std::ranges::sort(changed);
    changed.erase(std::unique(changed.begin(), changed.end()), changed.end());
    for (const uint64_t pair : changed)
      if (const BpeTokenizer::Merge m = from_key(pair); m.left == result || m.right == result)
        heap_.push({pairs_.at(pair).count, ~pair});
  }

  void merge_in(int32_t w, BpeTokenizer::Merge pair, int32_t result, std::vector<uint64_t>& changed) {
    Word& word = words_[static_cast<size_t>(w)];
    std::vector<int32_t>& t = word.tokens;
    size_t first = 0;
    while (first + 1 < t.size() && (t[first] != pair.left || t[first + 1] != pair.right)) ++first;
    if (first + 1 >= t.size()) return;  // an earlier merge removed the pair
    take_pairs(word);
    size_t to = first;
    for (size_t from = first; from < t.size(); ++to) {
      const bool here = from + 1 < t.size() && t[from] == pair.left && t[from + 1] == pair.right;
      t[to] = here ? result : t[from];
      from += here ? 2 : 1;
    }
    t.resize(to);
    add_pairs(w, &changed);
  }

  std::vector<std::string> tokens_;
  std::vector<BpeTokenizer::Merge> merges_;
  std::unordered_map<std::string, int32_t> ids_;
  std::vector<Word> words_;
  std::unordered_map<uint64_t, Pair> pairs_;
  std::priority_queue<Candidate> heap_;
};

}  // namespace

Json special_token(const Json& id, const std::string& content) {
  Json token{{"id", id}, {"content", content}, {"special", true}};
  for (const char* const no : {"single_word", "lstrip", "rstrip", "normalized"}) token[no] = false;
  return token;
}

ByteTokenizer::ByteTokenizer() : DescribedTokenizer("bytes", from_bytes()) {}

std::vector<int32_t> ByteTokenizer::encode_with(std::string_view text, const EncodeOptions&) const {
  std::vector<int32_t> tokens(text.size());
  for (size_t i = 0; i < text.size(); ++i) tokens[i] = static_cast<uint8_t>(text[i]);
  return tokens;
}

std::map<std::string, std::string> ByteTokenizer::files() const {
  Json vocab = Json::object();
  for (int b = 0; b < 256; ++b) vocab[bpe::spell(std::string(1, static_cast<char>(b)))] = b;
  return library_files(*this, vocab);
}

std::string ByteTokenizer::to_json() const { return written("bytes"); }

CharTokenizer::CharTokenizer(std::vector<char32_t> characters)
    : DescribedTokenizer("char", from_characters(characters)), characters_(std::move(characters)) {
  index_.reserve(characters_.size());
  for (size_t i = 0; i < characters_.size(); ++i) index_[characters_[i]] = static_cast<int32_t>(i);
}

CharTokenizer CharTokenizer::from_json(const Json& json, const std::string& what) {
  if (!json.contains("characters") || !json["characters"].is_array())
    bad_input("{}: the key 'characters' must be a list of code points", what);
  std::vector<char32_t> characters;
  for (const Json& c : json["characters"]) {
    if (!c.is_number_unsigned() || !is_scalar(c.get<uint64_t>()))
      bad_input("{}: 'characters' contains {}, which is not a Unicode code point", what, c.dump());
    if (!characters.empty() && c.get<char32_t>() <= characters.back())
      bad_input("{}: 'characters' must be in ascending order; {} follows {}", what, c.dump(),
                static_cast<uint32_t>(characters.back()));
    characters.push_back(c.get<char32_t>());
  }
  if (characters.empty()) bad_input("{}: 'characters' is empty", what);
  return CharTokenizer(std::move(characters));
}

CharTokenizer CharTokenizer::from_text(std::string_view text, const std::string& what) {
  return from_chunks([&](const auto& f) { f(text); }, what);
}

CharTokenizer CharTokenizer::from_chunks(const ChunkWalk& walk, const std::string& what) {
  std::vector<bool> found(0x110000);
  std::vector<char32_t> characters;
  size_t before = 0;
  walk([&](std::string_view text) {
    for (size_t position = 0; position < text.size();) {
      const size_t at = position;
      const std::optional<char32_t> c = next_code_point(text, position);
      if (!c)
        bad_input(
            "{} is not UTF-8 (invalid byte 0x{:02x} at offset {}), which `tokenizer` char requires; `tokenizer` bytes "
            "accepts any encoding",
            what, static_cast<uint8_t>(text[at]), before + at);
      if (!found[*c]) characters.push_back(*c);
      found[*c] = true;
    }
    before += text.size();
  });
  std::ranges::sort(characters);
  if (characters.empty()) bad_input("{} is empty; expected text", what);
  return CharTokenizer(std::move(characters));
}

std::vector<int32_t> CharTokenizer::encode_with(std::string_view text, const EncodeOptions& options) const {
  std::vector<int32_t> tokens;
  tokens.reserve(text.size());
  for (size_t position = 0; position < text.size();) {
    const size_t begin = position;
    const std::optional<char32_t> c = next_code_point(text, position);
    const int64_t at = options.offset + static_cast<int64_t>(begin);
    if (!c) throw Error(fmt::format("the text is not UTF-8: invalid byte at offset {}", at));
    const auto known = index_.find(*c);
    if (known == index_.end())
      throw Error(fmt::format("the character '{}' (U+{:04X}) at byte {} is not among the {} of the tokenizer",
                              *c < 0x20 ? std::string_view("?") : text.substr(begin, position - begin),
                              static_cast<uint32_t>(*c), at, vocab_size()));
    tokens.push_back(known->second);
  }
  return tokens;
}

std::map<std::string, std::string> CharTokenizer::files() const {
  Json vocab = Json::object();
  for (size_t i = 0; i < d_.tokens.size(); ++i) vocab[d_.tokens[i]] = i;
  return library_files(*this, vocab);
}

std::string CharTokenizer::to_json() const {
  return written("char", {{"characters", std::vector<uint32_t>(characters_.begin(), characters_.end())}});
}

BpeTokenizer::BpeTokenizer(std::vector<std::string> tokens, std::vector<Merge> merges, const std::string& what)
    : DescribedTokenizer("bpe", from_merges(std::move(tokens), merges, what)), merges_(std::move(merges)) {
  if (const int32_t end = d_.vocab.find("<|endoftext|>"); end >= 0) eos_ = end;
}

BpeTokenizer BpeTokenizer::parse_files(std::string_view vocab_json, std::string_view merges_txt,
                                       const std::string& vocab, const std::string& merges) {
  std::vector<std::string> tokens = parse_vocab(vocab_json, vocab);
  std::vector<Merge> pairs = parse_merges(merges_txt, tokens, merges);
  return {std::move(tokens), std::move(pairs), vocab};
}

BpeTokenizer BpeTokenizer::load_files(const std::filesystem::path& folder) {
  const std::filesystem::path vocab = folder / "vocab.json", merges = folder / "merges.txt";
  const std::string vocab_json = read_file(vocab);
  return parse_files(vocab_json, read_file(merges), vocab.string(), merges.string());
}

std::string BpeTokenizer::vocab_json() const {
  std::string out;
  for (size_t i = 0; i < d_.tokens.size(); ++i)
    out += fmt::format("{}{}:{}", i == 0 ? "{" : ",", Json(bpe::spell(d_.tokens[i])).dump(), i);
  return out + "}\n";
}

std::string BpeTokenizer::merges_txt() const {
  std::string out = "#version: 0.2\n";
  for (const auto& [left, right] : merges_)
    out += fmt::format("{} {}\n", bpe::spell(to_string(left)), bpe::spell(to_string(right)));
  return out;
}

std::map<std::string, std::string> BpeTokenizer::files() const {
  Json vocab = Json::object(), merges = Json::array();
  std::set<int32_t> made;  // results of merges; other tokens of several bytes are special and stored literally
  for (const auto& [left, right] : merges_) {
    merges.push_back(bpe::spell(to_string(left)) + " " + bpe::spell(to_string(right)));
    made.insert(d_.vocab.find(to_string(left) + to_string(right)));
  }
  std::vector<std::string> special;
  for (size_t i = 0; i < d_.tokens.size(); ++i) {
    const std::string& token = d_.tokens[i];
    const bool is_special =
        token.size() > 1 && !made.contains(static_cast<int32_t>(i)) && find_invalid_utf8(token) == std::string::npos;
    vocab[is_special ? special.emplace_back(token) : bpe::spell(token)] = i;
  }
  return library_files(*this, vocab, merges, special);
}

std::string BpeTokenizer::to_json() const {
  return written("bpe", {{"vocab.json", vocab_json()}, {"merges.txt", merges_txt()}});
}

void WordCounts::add(std::string_view text) {
  bpe::for_each_piece(text, [&](std::string_view piece) {
    const auto found = counts_.find(piece);
    if (found != counts_.end()) return void(++found->second);
    counts_.emplace(piece, 1);
    if (counts_.size() <= kMax) return;
    for (int64_t rare = 1; counts_.size() > kMax / 2; ++rare) {
      std::erase_if(counts_, [&](const auto& word) { return word.second <= rare; });
      forgotten_ = std::max(forgotten_, rare);
    }
  });
}

BpeTokenizer train_bpe(WordCounts pieces, const BpeTraining& options) {
  if (options.vocab_size < 256)
    throw FieldError("vocab", fmt::format("expected at least 256 (all bytes); got {}", options.vocab_size));
  Trainer trainer(std::exchange(pieces, {}).all());
  while (trainer.made() < options.vocab_size && trainer.step(options.min_count))
    if (options.progress && trainer.made() % kProgressEvery == 0) options.progress(trainer.made());
  return std::move(trainer).finish();
}

BpeTokenizer train_bpe(std::string_view text, const BpeTraining& options) {
  WordCounts pieces;
  pieces.add(text);
  return train_bpe(std::move(pieces), options);
}

}  // namespace tessera
