// Runs untrusted patterns with Oniguruma under limits.
#include <fmt/format.h>
#include <oniguruma.h>

#include <algorithm>
#include <ctime>
#include <map>
#include <memory>
#include <string>
#include <string_view>

#include "base/error.h"
#include "base/utf8.h"
#include "data/tokenizer/bpe.h"

namespace tessera::bpe {
namespace {

constexpr unsigned kMaxSteps = 10'000'000, kMaxStack = 25'000'000;  // per match attempt; stack: 1 GB
constexpr size_t kTried = 64, kMaxBytes = size_t{1} << 30;          // attempts between clock checks; maximum text size

using Regex = std::unique_ptr<regex_t, decltype(&onig_free)>;

const OnigUChar* token_bytes(std::string_view text) { return reinterpret_cast<const OnigUChar*>(text.data()); }

Regex compiled(std::string_view pattern, OnigSyntaxType* syntax) {
  OnigEncoding utf8 = ONIG_ENCODING_UTF8;
  [[maybe_unused]] static const int once = onig_initialize(&utf8, 1);
  regex_t* out = nullptr;
  OnigErrorInfo place;
  const OnigUChar* const begin = token_bytes(pattern);
  const int error = onig_new(&out, begin, begin + pattern.size(), ONIG_OPTION_NONE, utf8, syntax, &place);
  if (error == ONIG_NORMAL) return {out, &onig_free};
  OnigUChar why[ONIG_MAX_ERROR_MESSAGE_LEN];
  const int length = onig_error_code_to_str(why, error, &place);
  throw Error(std::string(reinterpret_cast<const char*>(why), static_cast<size_t>(length)));
}

Regex compiled_in(const char* before, std::string_view pattern, const char* after, OnigSyntaxType* syntax) {
  compiled(pattern, syntax);  // must also compile by itself: "a)(b" does not
  return compiled(fmt::format("{}(?:{}){}", before, pattern, after), syntax);
}

// Constructs that Oniguruma 6.9.8 treats differently from 6.9.10 (the version in `tokenizers`), with equivalents for
// both.
constexpr std::pair<std::string_view, std::string_view> kOlder[] = {
    {"[:punct:]", R"([[:punct:]\p{S}])"},
    {"[:^punct:]", R"([^[:punct:]\p{S}])"},
    {"\\p{Word}", "\\w"},
    {"\\R", R"((?>\r\n|[\n-\r\x{85}\x{2028}\x{2029}]))"}};

std::string in_older_words(std::string_view pattern) {
  std::string out;
  while (!pattern.empty()) {
    const auto* const row = std::ranges::find_if(kOlder, [&](const auto& r) { return pattern.starts_with(r.first); });
    const bool known = row != std::end(kOlder);
    const size_t taken = known ? row->first.size() : std::min<size_t>(pattern[0] == '\\' ? 2 : 1, pattern.size());
    out += known ? row->second : pattern.substr(0, taken);
    pattern.remove_prefix(taken);
  }
  return out;
}

size_t character_from(std::string_view text, size_t at) {
  while (at < text.size() && (static_cast<unsigned char>(text[at]) & 0xC0) == 0x80) ++at;
  return at;
}

double cpu_seconds() {
  timespec now{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

}  // namespace

struct Matching::State {
  std::unique_ptr<OnigMatchParam, decltype(&onig_free_match_param)> limits{onig_new_match_param(),
                                                                           &onig_free_match_param};
  OnigRegion region{};
  double until;
  size_t tries = 0;

  ~State() { onig_region_free(&region, 0); }
  // Called at every attempt to match.
  static int look_at_clock(OnigCalloutArgs*, void* state) {
    auto& s = *static_cast<State*>(state);
    return ++s.tries % kTried == 0 && cpu_seconds() > s.until ? ONIG_ABORT : ONIG_CALLOUT_SUCCESS;
  }
};

Matching::Matching(size_t bytes) : state_(new State) {
  state_->until = cpu_seconds() + 2 + 5e-6 * static_cast<double>(bytes);
  OnigMatchParam* const limits = state_->limits.get();
  onig_set_retry_limit_in_match_of_match_param(limits, kMaxSteps);
  onig_set_match_stack_limit_size_of_match_param(limits, kMaxStack);
  onig_set_progress_callout_of_match_param(limits, &State::look_at_clock);
  onig_set_callout_user_data_of_match_param(limits, state_.get());
}
Matching::~Matching() = default;

struct Split::Code {
  Regex regex;
  std::string pattern;
};

Split::Split(std::string_view pattern, bool literal, Behaviour behaviour, bool invert)
    : code_(std::make_shared<const Code>(
          Code{literal ? compiled(pattern, ONIG_SYNTAX_ASIS)
                       : compiled_in("(?{t})", in_older_words(pattern), "", ONIG_SYNTAX_DEFAULT),
               std::string(pattern)})),
      behaviour_(behaviour),
      invert_(invert) {}

Split Split::from_regex(std::string_view regex, Behaviour behaviour, bool invert) {
  return {regex, false, behaviour, invert};
}
Split Split::from_text(std::string_view text, Behaviour behaviour, bool invert) {
  return {text, true, behaviour, invert};
}

bool Split::match(std::string_view text, size_t from, Matching& matching, size_t& begin, size_t& end) const {
  Matching::State& s = *matching.state_;
  const OnigUChar *const first = token_bytes(text), *const last = first + text.size();
  const int found = onig_search_with_param(code_->regex.get(), first, last, first + from, last, &s.region,
                                           ONIG_OPTION_NONE, s.limits.get());
  if (found < ONIG_MISMATCH)
    throw Error(fmt::format("the pattern '{}' exceeds the time or memory limit at byte {} of a text of {} bytes",
                            code_->pattern, from, text.size()));
  if (found == ONIG_MISMATCH) return false;
  begin = static_cast<size_t>(s.region.beg[0]), end = std::max(begin, static_cast<size_t>(s.region.end[0]));
  return true;
}

// Calls f(begin, end, whether it matches) for segments of a UTF-8 text. As in `tokenizers`, an empty match directly
// after a match does not count. Oniguruma counts bytes in an int, so a longer text is split at the end of a line.
template <class F>
void Split::each(std::string_view text, Matching& matching, const F& f, size_t offset) const {
  if (text.size() > kMaxBytes) {
    const size_t line = text.rfind('\n', kMaxBytes - 1);
    const size_t cut = line == std::string_view::npos ? character_from(text, kMaxBytes) : line + 1;
    each(text.substr(0, cut), matching, f, offset);
    return each(text.substr(cut), matching, f, offset + cut);
  }
  size_t done = 0, begin = 0, end = 0;
  bool any = false;
  for (size_t from = 0; from <= text.size() && match(text, from, matching, begin, end);) {
    if (begin == end && any && end == done) {
      if (from == text.size()) break;
      from = character_from(text, from + 1);
      continue;
    }
    any = true;
    if (begin > done) f(offset + done, offset + begin, false);
    f(offset + begin, offset + end, true);
    from = done = end;
  }
  if (done < text.size()) f(offset + done, offset + text.size(), false);
}

void Split::pieces(std::string_view text, Matching& matching, const Each& f) const {
  while (!text.empty()) {
    const size_t valid = std::min(find_invalid_utf8(text), text.size());
    valid_pieces(text.substr(0, valid), matching, f);
    text.remove_prefix(valid);
    size_t broken = 0;
    for (size_t at = 0; broken < text.size() && !next_code_point(text, at);) at = ++broken;
    if (broken > 0) f(text.substr(0, broken));
    text.remove_prefix(broken);
  }
}

void Split::valid_pieces(std::string_view text, Matching& matching, const Each& f) const {
  size_t first = 0, last = 0;  // may still grow
  bool before = false, held = false;
  const auto flush = [&] {
    if (last > first) f(text.substr(first, last - first));
  };
  each(text, matching, [&](size_t begin, size_t end, bool matches) {
    const bool is_match = matches != invert_;
    if (behaviour_ == Behaviour::removed || behaviour_ == Behaviour::isolated) {
      if (end > begin && (!is_match || behaviour_ == Behaviour::isolated)) f(text.substr(begin, end - begin));
      return;
    }
    const bool joins = held && (behaviour_ == Behaviour::contiguous             ? is_match == before
                                : behaviour_ == Behaviour::merged_with_previous ? is_match && !before
                                                                                : before && !is_match);
    if (!joins) flush(), first = begin;
    last = end, before = is_match, held = true;
  });
  flush();
}

std::string Split::replaced(std::string_view text, Matching& matching, std::string_view by) const {
  std::string out;
  each(text, matching,
       [&](size_t begin, size_t end, bool matches) { out += matches ? by : text.substr(begin, end - begin); });
  return out;
}

void for_each_piece(std::string_view text, const Split::Each& f) {
  static const Split gpt2 = Split::from_regex(kGpt2);
  Matching matching(text.size());
  gpt2.pieces(text, matching, f);
}

bool fullmatch(std::string_view regex, std::string_view text) {
  const Regex full = compiled_in("", regex, "\\Z", ONIG_SYNTAX_PYTHON);
  const OnigUChar *const first = token_bytes(text), *const last = first + text.size();
  const int found = onig_match(full.get(), first, last, first, nullptr, ONIG_OPTION_NONE);
  if (found < ONIG_MISMATCH) throw Error(fmt::format("matching '{}' exceeds the time limit", text));
  return found >= 0;
}

bool is_word(char32_t c) {
  static const Split word = Split::from_regex(fmt::format("[{}]", kLibraryWord));
  std::string text;
  append_utf8(text, c);
  Matching matching(text.size());
  return word.replaced(text, matching, "").empty();
}

}  // namespace tessera::bpe
