// The pattern, run by PCRE2's just-in-time compiler.
#include "data/bpe/pieces.h"

#include <fmt/format.h>

#include <array>
#include <memory>
#include <string>
#include <vector>

#define PCRE2_CODE_UNIT_WIDTH 8  // the header asks for it
#include <pcre2.h>

#include "data/utf8.h"
#include "tensor/error.h"

namespace tessera::bpe {
namespace {

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

}  // namespace

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

}  // namespace tessera::bpe
