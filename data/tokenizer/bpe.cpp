// The alphabet as two small tables, patterns run by PCRE2's just-in-time compiler, and merging by a heap.
#include "data/tokenizer/bpe.h"

#include <fmt/format.h>

#include <memory>
#include <queue>

#define PCRE2_CODE_UNIT_WIDTH 8  // the header asks for it
#include <pcre2.h>

#include "data/utf8.h"
#include "tensor/error.h"

namespace tessera::bpe {
namespace {

constexpr int kLast = 0x100 + 67;  // the last code point of the alphabet

constexpr bool visible(int byte) {
  return (byte >= 0x21 && byte <= 0x7E) || (byte >= 0xA1 && byte <= 0xAC) || (byte >= 0xAE && byte <= 0xFF);
}

struct Tables {
  std::array<char32_t, 256> character{};
  std::array<int16_t, kLast + 1> byte{};  // -1: not in the alphabet
  std::array<uint8_t, 256> order{};
};

constexpr Tables make_tables() {
  Tables t;
  for (int16_t& b : t.byte) b = -1;
  size_t shown = 0, hidden = 188;
  for (int b = 0; b < 256; ++b) {
    const size_t place = visible(b) ? shown++ : hidden++;
    const char32_t c = visible(b) ? static_cast<char32_t>(b) : static_cast<char32_t>(0x100 + place - 188);
    t.order[place] = static_cast<uint8_t>(b);
    t.character[static_cast<size_t>(b)] = c;
    t.byte[c] = static_cast<int16_t>(b);
  }
  return t;
}
constexpr Tables kTables = make_tables();

// As a tokenizer.json writes it, and as we run it: [S] is white space. Possessive quantifiers (++) match the same here
// and keep no way back, so a long run costs no memory. Only the spaces of "\s+(?!\S)" and "\s*[\r\n]+" need one.
struct Written {
  std::string_view regex, ours;
};
constexpr std::array<Written, 5> kPatterns{{
    {R"('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+)",
     R"('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}++| ?\p{N}++| ?[^S\p{L}\p{N}]++|[S]+(?![^S])|[S]++)"},
    {R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)",
     R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^S\p{L}\p{N}]++[\r\n]*+|[S]*[\r\n]++|[S]+(?![^S])|[S]++)"},
    {R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)",
     R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}| ?[^S\p{L}\p{N}]++[\r\n]*+|[S]*[\r\n]++|[S]+(?![^S])|[S]++)"},
    {R"(\p{N})", R"(\p{N}|\P{N}++)"},
    {R"(\p{N}+)", R"(\p{N}++|\P{N}++)"},
}};
constexpr std::string_view kSpace =
    R"(\x{9}-\x{D}\x{20}\x{85}\x{A0}\x{1680}\x{2000}-\x{200A}\x{2028}\x{2029}\x{202F}\x{205F}\x{3000})";

std::string with_spaces(std::string_view pattern) {
  std::string out;
  for (size_t i = 0; i < pattern.size(); ++i) {
    const bool space = pattern[i] == 'S' && (pattern[i - 1] == '[' || pattern[i - 1] == '^');
    space ? out += kSpace : out += pattern[i];
  }
  return out;
}

using Code = std::unique_ptr<pcre2_code, decltype(&pcre2_code_free)>;
using MatchData = std::unique_ptr<pcre2_match_data, decltype(&pcre2_match_data_free)>;

Code compile(std::string_view pattern) {
  const std::string text = with_spaces(pattern);
  int error = 0;
  PCRE2_SIZE at = 0;
  Code code(pcre2_compile(reinterpret_cast<PCRE2_SPTR>(text.data()), text.size(), PCRE2_UTF | PCRE2_UCP, &error, &at,
                          nullptr),
            &pcre2_code_free);
  if (!code) throw Error(fmt::format("PCRE2 cannot compile the pattern of pieces: error {} at {}", error, at));
  pcre2_jit_compile(code.get(), PCRE2_JIT_COMPLETE);  // without a JIT, pcre2_match() interprets: the same, slower
  return code;
}

// The pieces of a text that is UTF-8 throughout.
void pieces_of_valid(const pcre2_code* code, pcre2_match_data* data, std::string_view text,
                     const std::function<void(std::string_view)>& f) {
  const auto* const subject = reinterpret_cast<PCRE2_SPTR>(text.data());
  for (size_t position = 0; position < text.size();) {
    const int count =
        pcre2_match(code, subject, text.size(), position, PCRE2_NO_UTF_CHECK | PCRE2_ANCHORED, data, nullptr);
    // Every character is in one of the classes, so something always matches.
    if (count < 1) throw Error(fmt::format("PCRE2 stopped at byte {} of a text: error {}", position, count));
    const size_t end = pcre2_get_ovector_pointer(data)[1];
    f(text.substr(position, end - position));
    position = end;
  }
}

// Length of the run of bytes at the start of `text` that are not UTF-8.
size_t invalid_run(std::string_view text) {
  size_t end = 0;
  while (end < text.size()) {
    size_t position = end;
    if (next_code_point(text, position)) break;
    ++end;
  }
  return end;
}

// A piece while it is merged: a linked list of tokens in an array.
struct Symbol {
  int32_t token, previous, next;  // next -1: none; token -1: merged into the one before
};

}  // namespace

const std::array<uint8_t, 256>& bytes_in_order() { return kTables.order; }

std::string spell(std::string_view bytes) {
  std::string out;
  for (const char b : bytes) append_utf8(out, kTables.character[static_cast<uint8_t>(b)]);
  return out;
}

std::optional<std::string> unspell(std::string_view spelling) {
  std::string out;
  for (size_t position = 0; position < spelling.size();) {
    const std::optional<char32_t> c = next_code_point(spelling, position);
    if (!c || *c > kLast || kTables.byte[*c] < 0) return std::nullopt;
    out += static_cast<char>(kTables.byte[*c]);
  }
  return out;
}

std::optional<Pattern> pattern_written(std::string_view regex) {
  for (size_t i = 0; i < kPatterns.size(); ++i)
    if (kPatterns[i].regex == regex) return static_cast<Pattern>(i);
  return std::nullopt;
}

void for_each_piece(std::string_view text, const std::function<void(std::string_view)>& f, Pattern pattern) {
  static const std::vector<Code> codes = [] {
    std::vector<Code> made;
    for (const Written& p : kPatterns) made.push_back(compile(p.ours));
    return made;
  }();
  const Code& code = codes[static_cast<size_t>(pattern)];
  const MatchData data(pcre2_match_data_create_from_pattern(code.get(), nullptr), &pcre2_match_data_free);
  while (!text.empty()) {
    const size_t valid = std::min(find_invalid_utf8(text), text.size());
    pieces_of_valid(code.get(), data.get(), text.substr(0, valid), f);
    text.remove_prefix(valid);
    if (text.empty()) break;
    const size_t run = invalid_run(text);
    f(text.substr(0, run));
    text.remove_prefix(run);
  }
}

void MergeTable::reserve(size_t merges) {
  ranks_.reserve(merges);
  results_.reserve(merges);
}

bool MergeTable::add(Merge merge, int32_t result) {
  if (!ranks_.emplace(pair_key(merge.left, merge.right), static_cast<int32_t>(results_.size())).second) return false;
  results_.push_back(result);
  return true;
}

// Merges in order of rank, and of place among equals: the heap holds those that applied when they were pushed, and what
// an earlier merge has taken away is noticed when it comes up.
void MergeTable::apply(std::span<const int32_t> piece, std::vector<int32_t>& out) const {
  if (piece.size() >= size_t{1} << 30) throw Error("a piece of text of 2^30 tokens or more");
  const auto n = static_cast<int32_t>(piece.size());
  std::vector<Symbol> symbols(piece.size());
  for (int32_t i = 0; i < n; ++i)
    symbols[static_cast<size_t>(i)] = {piece[static_cast<size_t>(i)], i - 1, i + 1 < n ? i + 1 : -1};
  std::priority_queue<uint64_t, std::vector<uint64_t>, std::greater<>> heap;  // rank, then place
  const auto rank_at = [&](int32_t i) {
    const Symbol& s = symbols[static_cast<size_t>(i)];
    if (s.token < 0 || s.next < 0) return -1;
    const auto found = ranks_.find(pair_key(s.token, symbols[static_cast<size_t>(s.next)].token));
    return found == ranks_.end() ? -1 : found->second;
  };
  const auto push = [&](int32_t i) {
    if (i < 0) return;
    if (const int32_t rank = rank_at(i); rank >= 0) heap.push(pair_key(rank, i));
  };
  for (int32_t i = 0; i < n; ++i) push(i);
  while (!heap.empty()) {
    const auto rank = static_cast<int32_t>(heap.top() >> 32), i = static_cast<int32_t>(heap.top() & 0xFFFFFFFF);
    heap.pop();
    if (rank_at(i) != rank) continue;
    Symbol& s = symbols[static_cast<size_t>(i)];
    Symbol& eaten = symbols[static_cast<size_t>(s.next)];
    s.token = results_[static_cast<size_t>(rank)];
    s.next = eaten.next;
    eaten.token = -1;
    if (s.next >= 0) symbols[static_cast<size_t>(s.next)].previous = i;
    push(i);
    push(s.previous);
  }
  for (int32_t i = n > 0 ? 0 : -1; i >= 0; i = symbols[static_cast<size_t>(i)].next)
    out.push_back(symbols[static_cast<size_t>(i)].token);
}

}  // namespace tessera::bpe
