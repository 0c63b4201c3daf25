// The tokenizer as GPT-2's two files, and as our one.
#include <fmt/format.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <optional>

#include "data/bpe/alphabet.h"
#include "data/bpe/bpe_tokenizer.h"
#include "data/files.h"
#include "data/json.h"
#include "tensor/error.h"

namespace tessera {
namespace {

using Json = nlohmann::json;

std::vector<std::string> parse_vocab(std::string_view text, const std::string& what) {
  const Json json = parse_json(text, what);
  if (!json.is_object()) throw InputError(what + ": expected one object of tokens and their numbers");
  std::vector<std::string> tokens(json.size());
  std::vector<bool> seen(json.size());
  for (const auto& [spelling, id] : json.items()) {
    if (!id.is_number_unsigned() || id.get<uint64_t>() >= tokens.size() || seen[id.get<size_t>()])
      throw InputError(fmt::format("{}: the token '{}' has the number {}; expected each of 0 to {} once", what,
                                   spelling, id.dump(), tokens.size() - 1));
    seen[id.get<size_t>()] = true;
    tokens[id.get<size_t>()] = bpe::unspell(spelling).value_or(spelling);  // a special token may have any character
  }
  return tokens;
}

using Ids = std::unordered_map<std::string_view, int32_t>;

int32_t id_of(const Ids& ids, std::string_view spelling, const std::string& what, size_t line) {
  const std::optional<std::string> bytes = bpe::unspell(spelling);
  const auto found = bytes ? ids.find(*bytes) : ids.end();
  if (found == ids.end())
    throw InputError(fmt::format("{}: line {}: '{}' is no token of the vocabulary", what, line, spelling));
  return found->second;
}

std::vector<BpeTokenizer::Merge> parse_merges(std::string_view text, const std::vector<std::string>& tokens,
                                              const std::string& what) {
  Ids ids;
  for (size_t i = 0; i < tokens.size(); ++i) ids.emplace(tokens[i], static_cast<int32_t>(i));
  std::vector<BpeTokenizer::Merge> merges;
  for (size_t line = 1; !text.empty(); ++line) {
    const size_t end = std::min(text.find('\n'), text.size());
    const std::string_view row = text.substr(0, end);
    text.remove_prefix(std::min(end + 1, text.size()));
    if (line == 1 && row.starts_with("#version")) continue;
    const size_t space = row.find(' ');
    if (space == std::string_view::npos || row.find(' ', space + 1) != std::string_view::npos)
      throw InputError(fmt::format("{}: line {}: expected two tokens with one space between them", what, line));
    merges.push_back({id_of(ids, row.substr(0, space), what, line), id_of(ids, row.substr(space + 1), what, line)});
  }
  return merges;
}

}  // namespace

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
  for (size_t i = 0; i < tokens_.size(); ++i)
    out += fmt::format("{}{}:{}", i == 0 ? "{" : ",", Json(bpe::spell(tokens_[i])).dump(), i);
  return out + "}\n";
}

std::string BpeTokenizer::merges_txt() const {
  std::string out = "#version: 0.2\n";
  for (const auto& [left, right] : merges_)
    out += fmt::format("{} {}\n", bpe::spell(tokens_[static_cast<size_t>(left)]),
                       bpe::spell(tokens_[static_cast<size_t>(right)]));
  return out;
}

std::string BpeTokenizer::to_json() const {
  return Json{{"format", kTokenizerFormat},
              {"version", 1},
              {"kind", "bpe"},
              {"vocab.json", vocab_json()},
              {"merges.txt", merges_txt()}}
             .dump() +
         "\n";
}

}  // namespace tessera
