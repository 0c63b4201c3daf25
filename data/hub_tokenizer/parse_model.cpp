// The vocabulary, the merges and the added tokens of a tokenizer.json.
#include <algorithm>
#include <optional>

#include "data/bpe/alphabet.h"
#include "data/hub_tokenizer/description.h"
#include "data/hub_tokenizer/parse.h"
#include "data/json.h"

namespace tessera::hub {
namespace {

// The byte of a token like "<0x0A>".
std::optional<uint8_t> byte_of(std::string_view spelling) {
  if (spelling.size() != 6 || !spelling.starts_with("<0x") || spelling[5] != '>') return std::nullopt;
  int value = 0;
  for (const char c : spelling.substr(3, 2)) {
    const size_t digit = std::string_view("0123456789ABCDEF").find(c);
    if (digit == std::string_view::npos) return std::nullopt;
    value = value * 16 + static_cast<int>(digit);
  }
  return static_cast<uint8_t>(value);
}

bool is_blank(const Json& text) { return text.is_string() && text.get_ref<const std::string&>().empty(); }

class Model {
 public:
  Model(const Json& json, const std::string& what, Description& d) : model_(at(json, "model")), what_(what), d_(d) {
    flags();
    number_tokens(at(json, "added_tokens"));
    read_merges();
    if (const Json& name = at(model_, "unk_token"); name.is_string() && !is_blank(name)) {
      const auto found = d_.vocab.find(name.get_ref<const std::string&>());
      if (found == d_.vocab.end()) fail(fmt::format("'unk_token' {} is not in the vocabulary", shown(name)));
      d_.unknown = found->second;
    }
  }

 private:
  [[noreturn]] void fail(const std::string& why) const { throw InputError(what_ + ": " + why); }

  void flags() {
    // Files of the first versions name no type.
    if (!model_.is_object() || (model_.contains("type") && model_["type"] != "BPE"))
      fail(fmt::format("the model is of type {}; expected BPE", shown(at(model_, "type"))));
    if (const Json& dropout = at(model_, "dropout"); !dropout.is_null() && dropout != 0)
      fail(fmt::format("'dropout' is {}; expected none", shown(dropout)));
    for (const char* const key : {"continuing_subword_prefix", "end_of_word_suffix"})
      if (const Json& text = at(model_, key); !text.is_null() && !is_blank(text))
        fail(fmt::format("'{}' is {}; expected none", key, shown(text)));
    d_.fuse_unknown = flag(model_, "fuse_unk", false, what_);
    d_.byte_fallback = flag(model_, "byte_fallback", false, what_);
    d_.ignore_merges = flag(model_, "ignore_merges", false, what_);
    if (d_.byte_fallback && d_.byte_level) fail("'byte_fallback' and a ByteLevel pre_tokenizer; expected one of them");
  }

  std::string bytes_of(const std::string& spelling) const {
    if (d_.byte_level) return bpe::unspell(spelling).value_or(spelling);
    if (const auto byte = byte_of(spelling); byte && d_.byte_fallback) return std::string(1, static_cast<char>(*byte));
    std::string out;
    for (size_t from = 0;;) {
      const size_t mark = spelling.find(kMark, from);
      out += spelling.substr(from, mark - from);
      if (mark == std::string::npos) return out;
      out += ' ';
      from = mark + kMark.size();
    }
  }

  // The place of a token's number, which must be free.
  void set(const Json& id, const std::string& spelling) {
    const auto number = natural(id);
    if (spelling.empty()) fail(fmt::format("token {} is empty", shown(id)));
    if (!number || static_cast<size_t>(*number) >= d_.tokens.size() || !d_.tokens[static_cast<size_t>(*number)].empty())
      fail(fmt::format("the token {} has the number {}; expected each of 0 to {} once", shown(spelling), shown(id),
                       d_.tokens.size() - 1));
    d_.tokens[static_cast<size_t>(*number)] = bytes_of(spelling);
  }

  void number_tokens(const Json& added) {
    const Json& vocab = at(model_, "vocab");
    if (!vocab.is_object() || vocab.empty()) fail("the model's 'vocab' must be an object of tokens and their numbers");
    if (!added.is_null() && !added.is_array()) fail("'added_tokens' must be a list");
    size_t behind = 0;  // added tokens that the vocabulary does not have
    for (const Json& token : added) behind += vocab.contains(content_of(token)) ? 0 : 1;
    if (vocab.size() + behind > kMostTokens)
      fail(fmt::format("{} tokens; expected at most {}", vocab.size() + behind, kMostTokens));
    d_.tokens.resize(vocab.size() + behind);
    d_.vocab.reserve(vocab.size());
    d_.byte_tokens.assign(256, -1);
    for (const auto& [spelling, id] : vocab.items()) {
      set(id, spelling);
      add_to_vocab(spelling, id.get<int32_t>());
    }
    for (const Json& token : added) add(token, vocab);
  }

  void add_to_vocab(const std::string& spelling, int32_t token) {
    const std::optional<std::string> bytes = d_.byte_level ? bpe::unspell(spelling) : std::nullopt;
    d_.vocab.emplace(bytes.value_or(spelling), token);
    if (bytes && bytes->size() == 1) d_.byte_tokens[static_cast<uint8_t>((*bytes)[0])] = token;
    if (const auto byte = byte_of(spelling); byte && d_.byte_fallback) d_.byte_tokens[*byte] = token;
  }

  const std::string& content_of(const Json& token) const {
    const Json& content = at(token, "content");
    if (!content.is_string()) fail(fmt::format("the added token {} has no 'content'", shown(token)));
    return content.get_ref<const std::string&>();
  }

  void add(const Json& token, const Json& vocab) {
    const std::string& content = content_of(token);
    if (content.empty() || content.size() > kLongestAdded)
      fail(fmt::format("an added token of {} bytes; expected 1 to {}", content.size(), kLongestAdded));
    for (const char* const key : {"single_word", "lstrip", "rstrip"})
      if (flag(token, key, false, what_))
        fail(fmt::format("the added token {} has '{}'; expected none", shown(content), key));
    const Json& id = at(token, "id");
    if (const Json& known = at(vocab, content.c_str()); known.is_null()) {
      set(id, content);
    } else if (id != known) {
      fail(fmt::format("the added token {} has the number {} and in the vocabulary {}", shown(content), shown(id),
                       shown(known)));
    }
    const bool special = flag(token, "special", false, what_);
    d_.added.push_back({content, id.get<int32_t>(), special, flag(token, "normalized", !special, what_)});
  }

  // Of "left right", or ["left", "right"].
  std::pair<std::string_view, std::string_view> halves(const Json& merge, size_t rank) const {
    if (merge.is_array() && merge.size() == 2 && merge[0].is_string() && merge[1].is_string())
      return {merge[0].get_ref<const std::string&>(), merge[1].get_ref<const std::string&>()};
    if (merge.is_string()) {
      const std::string_view text = merge.get_ref<const std::string&>();
      if (const size_t space = text.find(' ');
          space != std::string_view::npos && text.find(' ', space + 1) > text.size())
        return {text.substr(0, space), text.substr(space + 1)};
    }
    fail(fmt::format("merge {} is {}; expected two tokens", rank, shown(merge)));
  }

  int32_t id_of(std::string_view spelling, size_t rank) const {
    const std::optional<std::string> bytes =
        d_.byte_level ? bpe::unspell(spelling) : std::optional(std::string(spelling));
    const auto found = bytes ? d_.vocab.find(*bytes) : d_.vocab.end();
    if (found == d_.vocab.end()) fail(fmt::format("merge {} has '{}', which is not in the vocabulary", rank, spelling));
    return found->second;
  }

  void read_merges() {
    const Json& merges = at(model_, "merges");
    if (!merges.is_array()) fail("the model's 'merges' must be a list");
    if (merges.size() > kMostMerges) fail(fmt::format("{} merges; expected at most {}", merges.size(), kMostMerges));
    d_.merges.reserve(merges.size());
    d_.marks_begin_words = !d_.byte_level && !d_.ignore_merges && d_.vocab.contains(kMark);
    for (size_t rank = 0; rank < merges.size(); ++rank) {
      const auto [left, right] = halves(merges[rank], rank);
      const std::string joined = std::string(left) + std::string(right);
      const bpe::Merge merge{.left = id_of(left, rank), .right = id_of(right, rank)};
      if (!d_.merges.add(merge, id_of(joined, rank)))
        fail(fmt::format("merge {} (into '{}') appears twice", rank, joined));
      if (right.starts_with(kMark) && !left.ends_with(kMark)) d_.marks_begin_words = false;
    }
  }

  const Json& model_;
  const std::string& what_;
  Description& d_;
};

}  // namespace

void parse_model(const Json& json, const std::string& what, Description& d) { const Model model(json, what, d); }

Description describe(const Json& json, const std::string& what) {
  if (!at(json, "model").is_object()) throw InputError(what + ": not a tokenizer.json (it has no 'model')");
  Description d;
  parse_steps(json, what, d);
  parse_model(json, what, d);
  parse_ends(json, what, d);
  return d;
}

}  // namespace tessera::hub
