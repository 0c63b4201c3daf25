// Encoding and decoding.
#include <utf8proc.h>

#include <algorithm>
#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "base/bad_input.h"
#include "base/utf8.h"
#include "data/tokenizer/described.h"

namespace tessera {

using hub::kMark;

namespace {

bool is_ascii(char c) { return static_cast<unsigned char>(c) < 0x80; }

// Sorts marks stably by class; libutf8proc's sort takes quadratic time.
void order_marks(std::vector<utf8proc_int32_t>& points) {
  const auto mark = [](utf8proc_int32_t c) { return utf8proc_get_property(c)->combining_class; };
  for (auto at = points.begin(); at != points.end();) {
    if (mark(*at) == 0) {
      ++at;
      continue;
    }
    const auto end = std::find_if(at, points.end(), [&](utf8proc_int32_t c) { return mark(c) == 0; });
    std::stable_sort(at, end, [&](utf8proc_int32_t a, utf8proc_int32_t b) { return mark(a) < mark(b); });
    at = end;
  }
}

using Kind = hub::Change::Kind;

void append_normal(std::string& out, std::string_view stretch, Kind form, std::vector<utf8proc_int32_t>& points) {
  const bool compatible = form == Kind::nfkc || form == Kind::nfkd, composes = form == Kind::nfc || form == Kind::nfkc;
  const auto options = static_cast<utf8proc_option_t>(UTF8PROC_DECOMPOSE | (compatible ? UTF8PROC_COMPAT : 0));
  points.clear();
  for (size_t position = 0; position < stretch.size();) {
    const auto c = static_cast<utf8proc_int32_t>(next_code_point(stretch, position).value());
    utf8proc_int32_t parts[32];  // a character has at most four in normal form D, and 18 in KD
    int boundary = 0;
    const utf8proc_ssize_t n = utf8proc_decompose_char(c, parts, 32, options, &boundary);
    if (n < 0 || n > 32) throw Error(fmt::format("utf8proc cannot decompose U+{:04X}", c));
    points.insert(points.end(), parts, parts + n);
  }
  order_marks(points);
  auto composed = static_cast<utf8proc_ssize_t>(points.size());
  if (composes)
    composed = utf8proc_normalize_utf32(points.data(), composed,
                                        static_cast<utf8proc_option_t>(UTF8PROC_STABLE | UTF8PROC_COMPOSE));
  if (composed < 0) throw Error(fmt::format("utf8proc: {}", utf8proc_errmsg(composed)));
  for (utf8proc_ssize_t i = 0; i < composed; ++i)
    append_utf8(out, static_cast<char32_t>(points[static_cast<size_t>(i)]));
}

// A Unicode normal form replaces all spellings of a character by one (Unicode Standard Annex 15). Only non-ASCII spans
// are passed to libutf8proc. Cost: one pass; n log n in the marks on one letter.
std::string normal_form(std::string_view text, Kind form) {
  std::string out;
  out.reserve(text.size());
  std::vector<utf8proc_int32_t> points;
  while (!text.empty()) {
    const size_t other = static_cast<size_t>(std::find_if_not(text.begin(), text.end(), is_ascii) - text.begin());
    const size_t plain = other == text.size() ? other : other - (other > 0 ? 1 : 0);  // the base letter of a mark
    out += text.substr(0, plain);
    text.remove_prefix(plain);
    if (text.empty()) break;
    const auto end = std::find_if(text.begin() + 1, text.end(), is_ascii);
    const auto length = static_cast<size_t>(end - text.begin());
    append_normal(out, text.substr(0, length), form, points);
    text.remove_prefix(length);
  }
  return out;
}

template <class F>
std::string by_characters(std::string_view text, const F& f) {
  std::string out;
  out.reserve(text.size());
  for (size_t position = 0; position < text.size();) f(next_code_point(text, position).value(), out);
  return out;
}

std::string changed(std::string_view text, const hub::Change& change, bpe::Matching& matching) {
  switch (change.kind) {
    case Kind::lowercase:
      return by_characters(text, [](char32_t c, std::string& out) {
        if (c == 0x130)
          out += "i\xCC\x87";  // the only letter whose lower case has two characters
        else
          append_utf8(out, static_cast<char32_t>(utf8proc_tolower(static_cast<utf8proc_int32_t>(c))));
      });
    case Kind::strip_accents:
      return by_characters(text, [](char32_t c, std::string& out) {
        const utf8proc_category_t category = utf8proc_category(static_cast<utf8proc_int32_t>(c));
        if (category < UTF8PROC_CATEGORY_MN || category > UTF8PROC_CATEGORY_ME) append_utf8(out, c);
      });
    case Kind::strip_left:
      return std::string(stripped(text, true, false, is_white_space));
    case Kind::strip_right:
      return std::string(stripped(text, false, true, is_white_space));
    case Kind::prepend:
      return text.empty() ? "" : change.text + std::string(text);
    case Kind::replace:
      return change.from->replaced(text, matching, change.text);
    default:
      return normal_form(text, change.kind);
  }
}

// A segment begins at each mark after another character.
void cut_at_marks(std::string_view text, const std::function<void(std::string_view)>& f) {
  size_t begin = 0;
  for (size_t mark = text.find(kMark); mark != std::string_view::npos; mark = text.find(kMark, mark + kMark.size())) {
    if (mark == begin || text.substr(0, mark).ends_with(kMark)) continue;
    f(text.substr(begin, mark - begin));
    begin = mark;
  }
  if (begin < text.size()) f(text.substr(begin));
}

std::string with_marks(std::string_view text) {
  std::string out;
  for (const char c : text) c == ' ' ? out += kMark : out += c;
  return out;
}

bool word_at_begin(std::string_view text) {
  size_t position = 0;
  return !text.empty() && bpe::is_word(next_code_point(text, position).value());
}
bool word_at_end(std::string_view text) { return !text.empty() && word_at_begin(text.substr(last_character(text))); }

// Caches the output positions of short pieces' tokens, because texts repeat words.
class KnownPieces {
 public:
  // Pieces must outlive the cache.
  explicit KnownPieces(std::vector<int32_t>& out) : out_(&out) {}

  // encode(piece) appends the tokens of a new piece.
  template <class Encode>
  void append(std::string_view piece, const Encode& encode) {
    const bool remember = piece.size() <= kBytes;
    if (const auto found = remember ? known_.find(piece) : known_.end(); found != known_.end()) {
      const Place place = found->second;
      for (size_t i = 0; i < place.count; ++i) out_->push_back((*out_)[place.begin + i]);
      return;
    }
    const size_t begin = out_->size();
    encode(piece);
    if (remember && known_.size() < kPieces) known_.emplace(piece, Place{begin, out_->size() - begin});
  }

 private:
  static constexpr size_t kBytes = 48;  // longest stored piece
  static constexpr size_t kPieces = 1 << 18;
  struct Place {
    size_t begin, count;
  };
  std::vector<int32_t>* out_;
  std::unordered_map<std::string_view, Place> known_;
};

}  // namespace

void hub::AddedTokens::add(std::string_view content, const AddedToken& token) {
  tokens_[std::string(content)] = token;
  begins_[static_cast<uint8_t>(content.at(0))] = true;
}

// The longest token is, in sorted order, the last one not after the text, or a prefix of that one.
std::map<std::string, hub::AddedToken, std::less<>>::const_iterator hub::AddedTokens::longest(
    std::string_view text) const {
  for (auto found = tokens_.upper_bound(text); found != tokens_.begin(); found = tokens_.upper_bound(text)) {
    const std::string& before = (--found)->first;
    if (text.starts_with(before)) return found;
    text = text.substr(0, static_cast<size_t>(std::ranges::mismatch(text, before).in1 - text.begin()));
  }
  return tokens_.end();
}

void hub::AddedTokens::split(std::string_view text, bool special,
                             const std::function<void(std::string_view, int32_t)>& f) const {
  size_t begin = 0;  // end of the last token
  for (size_t at = 0; at < text.size() && !tokens_.empty();) {
    const auto one = begins_[static_cast<uint8_t>(text[at])] ? longest(text.substr(at)) : tokens_.end();
    if (one == tokens_.end()) {
      ++at;
      continue;
    }
    const AddedToken& found = one->second;
    const size_t length = one->first.size();
    const std::string_view before = text.substr(0, at), after = text.substr(at + length);
    if ((special || !found.special) && (!found.single_word || (!word_at_end(before) && !word_at_begin(after)))) {
      const size_t from = found.left ? std::max(stripped(before, false, true, is_white_space).size(), begin) : at;
      const size_t to = text.size() - stripped(after, found.right, false, is_white_space).size();
      if (from > begin) f(text.substr(begin, from - begin), -1);
      f(text.substr(from, to - from), found.token);
      begin = to;
    }
    at += length;
  }
  if (begin < text.size()) f(text.substr(begin), -1);
}

void hub::AddedTokens::count_special(std::string_view text, std::map<std::string, int64_t>& counts) const {
  for (size_t at = 0; at < text.size() && !tokens_.empty(); ++at)
    if (const auto one = begins_[static_cast<uint8_t>(text[at])] ? longest(text.substr(at)) : tokens_.end();
        one != tokens_.end()) {
      at += one->first.size() - 1;
      if (one->second.special) ++counts[one->first];
    }
}

DescribedTokenizer::DescribedTokenizer(std::string_view kind, hub::Description d, const std::string& what)
    : Tokenizer(kind), d_(std::move(d)) {
  for (const auto& [content, t] : d_.added) {
    if (!names_.add(content, t.token)) bad_input("{}: the added token '{}' appears twice", what, content);
    std::string buffer;
    bpe::Matching matching(content.size());
    const std::string_view text = t.normalized ? normalized(content, true, matching, buffer) : content;
    if (!text.empty()) (t.normalized ? normal_ : written_).add(text, t);
  }
}

std::vector<int32_t> DescribedTokenizer::encode_with(std::string_view text, const EncodeOptions& options) const {
  std::vector<int32_t> out;
  out.reserve(text.size() / 3);
  if (options.add_ends) out = d_.before;
  const bool broken = !d_.any_bytes && find_invalid_utf8(text) != std::string_view::npos;
  const std::string mended = broken ? replace_broken(text) : std::string();
  bool first = true;
  bpe::Matching matching(text.size());
  const auto append = [&](std::string_view found, int32_t token) {
    const bool begins = std::exchange(first, false);
    if (token >= 0) return out.push_back(token);
    const bool prefixed = !begins || options.begins;
    bool span_begins = begins;
    std::string buffer;
    normal_.split(normalized(found, prefixed, matching, buffer), options.special_in_text,
                  [&](std::string_view span, int32_t inside) {
                    const bool begins_span = std::exchange(span_begins, false);
                    if (inside >= 0) return out.push_back(inside);
                    encode_text(span, begins_span && options.first, !begins_span || options.begins, matching, out);
                  });
  };
  written_.split(broken ? std::string_view(mended) : text, options.special_in_text, append);
  if (options.add_ends) out.insert(out.end(), d_.after.begin(), d_.after.end());
  return out;
}

// `buffer` stores the result if it differs from `text`.
std::string_view DescribedTokenizer::normalized(std::string_view text, bool prefixed, bpe::Matching& matching,
                                                std::string& buffer) const {
  for (const hub::Change& change : d_.changes)
    if (prefixed || change.kind != Kind::prepend) text = buffer = changed(text, change, matching);
  return text;
}

// `first`: at the beginning of the full text; `prefixed`: a beginning mark may be prepended.
void DescribedTokenizer::encode_text(std::string_view text, bool first, bool prefixed, bpe::Matching& matching,
                                     std::vector<int32_t>& out) const {
  std::string begun;
  if (d_.marks_spaces) text = begun = with_marks(text);
  const bool mark = d_.prefix_mark == hub::Prefix::always || (d_.prefix_mark == hub::Prefix::first && first);
  if (prefixed && mark && !text.starts_with(kMark)) text = begun = std::string(kMark) + std::string(text);
  if (prefixed && d_.prefix_space && !text.starts_with(' ')) text = begun = " " + std::string(text);
  const bool bytes_stay = d_.byte_level && !d_.ignore_merges;  // a single byte merges with nothing
  std::vector<int32_t> symbols;
  KnownPieces known(out);
  cut(text, 0, matching, [&](std::string_view piece) {
    if (const int32_t token = piece.size() == 1 && bytes_stay ? d_.byte_tokens[static_cast<uint8_t>(piece[0])] : -1;
        token >= 0)
      return out.push_back(token);
    known.append(piece, [&](std::string_view unknown) { encode_piece(unknown, symbols, out); });
  });
}

void DescribedTokenizer::cut(std::string_view text, size_t step, bpe::Matching& matching,
                             const bpe::Split::Each& f) const {
  if (step == d_.cuts.size()) return d_.marks_begin_words ? cut_at_marks(text, f) : f(text);
  if (step + 1 == d_.cuts.size() && !d_.marks_begin_words) return d_.cuts[step].pieces(text, matching, f);
  d_.cuts[step].pieces(text, matching, [&](std::string_view piece) { cut(piece, step + 1, matching, f); });
}

void DescribedTokenizer::encode_piece(std::string_view piece, std::vector<int32_t>& symbols,
                                      std::vector<int32_t>& out) const {
  if (d_.ignore_merges)
    if (const int32_t token = d_.vocab.find(d_.byte_level ? bpe::spell(piece) : std::string(piece)); token >= 0)
      return out.push_back(token);
  symbols.clear();
  split_symbols(piece, symbols);
  d_.merges.apply(symbols, out);
}

// Bytes or characters; unknown characters become bytes or else the unknown token.
void DescribedTokenizer::split_symbols(std::string_view piece, std::vector<int32_t>& symbols) const {
  bool unknown_before = false;
  for (size_t position = 0; position < piece.size();) {
    const size_t begin = position;
    if (d_.byte_level || !next_code_point(piece, position)) ++position;
    const std::string_view character = piece.substr(begin, position - begin);
    const auto byte_token = [&](char c) { return d_.byte_tokens[static_cast<uint8_t>(c)]; };
    const int32_t known = d_.byte_level ? -1 : d_.vocab.find(character);
    if (known >= 0) {
      symbols.push_back(known);
    } else if (std::all_of(character.begin(), character.end(), [&](char c) { return byte_token(c) >= 0; })) {
      for (const char c : character) symbols.push_back(byte_token(c));
    } else if (d_.unknown >= 0) {
      if (!unknown_before || !d_.fuse_unknown) symbols.push_back(d_.unknown);
      unknown_before = true;
      continue;
    } else {
      throw Error(fmt::format("the tokenizer has no token for '{}' and no unknown token", character));
    }
    unknown_before = false;
  }
}

std::pair<bool, bool> DescribedTokenizer::strips(int32_t token) const {
  for (const auto& added : d_.added)
    if (added.second.token == token) return {added.second.left, added.second.right};
  return {};
}

std::optional<int32_t> DescribedTokenizer::special(std::string_view name) const {
  const int32_t found = names_.find(name);
  return found < 0 ? std::nullopt : std::optional(found);
}

const std::string& DescribedTokenizer::to_string(int32_t token) const {
  if (token >= 0 && token < vocab_size()) return d_.tokens[static_cast<size_t>(token)];
  const std::string named = kind_ == "hub" ? "" : std::string(kind_) + " ";
  throw Error(fmt::format("token {} is outside the {}tokenizer's vocabulary of {}", token, named, vocab_size()));
}

std::string DescribedTokenizer::decode(std::span<const int32_t> tokens) const {
  std::string out;
  for (size_t i = 0; i < tokens.size(); ++i) {
    out += to_string(tokens[i]);
    if (i == 0 && d_.strip == hub::Strip::marks_of_first) std::erase(out, ' ');
  }
  if (d_.strip == hub::Strip::space && out.starts_with(' ')) out.erase(0, 1);
  return out;
}

}  // namespace tessera
