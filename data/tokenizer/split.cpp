// Patterns of strangers: from Oniguruma's spelling to that of PCRE2, run by its just-in-time compiler within limits.
#include <fmt/format.h>
#include <utf8proc.h>

#include <algorithm>
#include <ctime>
#include <utility>

#define PCRE2_CODE_UNIT_WIDTH 8  // the header asks for it
#include <pcre2.h>

#include "data/tokenizer/bpe.h"
#include "data/utf8.h"
#include "tensor/error.h"

namespace tessera::bpe {
namespace {

constexpr uint32_t kMostSteps = 2'000'000, kMostHeap = 1 << 20;  // of one try at one place; KiB
constexpr size_t kTried = 64;  // places tried, and then matches made, between two looks at the clock

// White space by Unicode's property: PCRE2's \s counts U+180E too.
constexpr std::string_view kSpace =
    R"(\x{9}-\x{D}\x{20}\x{85}\x{A0}\x{1680}\x{2000}-\x{200A}\x{2028}\x{2029}\x{202F}\x{205F}\x{3000})";
constexpr std::string_view kWord = R"(\p{Alphabetic}\p{M}\p{Nd}\p{Pc})";  // PCRE2's \w knows less of these
// Outside of a class, Oniguruma's \w and \b take Latin-1's fractions and raised digits for a word's, too.
constexpr std::string_view kWordAlone = R"(\p{Alphabetic}\p{M}\p{Nd}\p{Pc}\xB2\xB3\xB9\xBC-\xBE)";
constexpr std::string_view kHex = "0-9A-Fa-f";

// Names of Oniguruma's classes, without `_`, `-`, spaces and in small letters, and what they hold.
constexpr std::pair<std::string_view, std::string_view> kClasses[] = {{"alnum", R"(\p{Alphabetic}\p{Nd})"},
                                                                      {"alpha", R"(\p{Alphabetic})"},
                                                                      {"blank", R"(\x09\p{Zs})"},
                                                                      {"cntrl", R"(\p{Cc})"},
                                                                      {"digit", R"(\p{Nd})"},
                                                                      {"lower", R"(\p{lowercase})"},
                                                                      {"punct", R"(\p{P})"},
                                                                      {"posixpunct", R"(\p{P}\p{S})"},
                                                                      {"space", kSpace},
                                                                      {"upper", R"(\p{uppercase})"},
                                                                      {"word", kWord},
                                                                      {"xdigit", kHex}};
// The sets that \s, \w, \d and \h name.
constexpr std::pair<char, std::string_view> kSets[] = {{'s', kSpace}, {'w', kWord}, {'d', R"(\p{Nd})"}, {'h', kHex}};
constexpr std::string_view kCases = R"(\p{lu}\p{ll}\p{lt}\p{uppercase}\p{lowercase})";
// The beginnings of groups that are the same in both; behind the last two stands a name.
constexpr std::string_view kGroups[] = {"?:", "?=", "?!", "?>", "?<=", "?<!", "?<", "?'"};

using CodePointer = std::unique_ptr<pcre2_code, decltype(&pcre2_code_free)>;

CodePointer compiled(std::string_view pattern, uint32_t options, int& error, size_t& at) {
  return {pcre2_compile(reinterpret_cast<PCRE2_SPTR>(pattern.data()), pattern.size(),
                        options | PCRE2_UTF | PCRE2_USE_OFFSET_LIMIT, &error, &at, nullptr),
          &pcre2_code_free};
}

// A pattern that Oniguruma reads in Ruby's syntax, in PCRE2's.
class Translation {
 public:
  explicit Translation(std::string_view regex) : in_(regex) {
    while (at_ < in_.size()) next();
    if (groups_.size() > 1) refuse("a group without its end");
    out_ += std::string(groups_.back().options, ')');
  }
  std::string take() && { return std::move(out_); }

 private:
  struct Group {
    size_t begin;
    size_t options;  // open groups that stand for options: these hold to the end of the group around them
    bool caseless;
  };

  [[noreturn]] static void refuse(std::string_view what) { throw Error(std::string(what)); }

  bool eat(std::string_view text) {
    if (!in_.substr(at_).starts_with(text)) return false;
    at_ += text.size();
    return true;
  }
  char take_byte() { return at_ < in_.size() ? in_[at_++] : (refuse("a '\\' or a '[' at its end"), '\0'); }
  std::string_view take_until(char end) {
    const size_t length = in_.substr(at_).find(end);
    if (length == std::string_view::npos) refuse(fmt::format("no '{}' where one is expected", end));
    at_ += length + 1;
    return in_.substr(at_ - length - 1, length);
  }

  void item(std::string_view text) {  // something that a quantifier may stand behind
    atom_ = out_.size(), quantified_ = false;
    out_ += text;
  }

  void next() {
    const size_t begin = at_;
    const char c = take_byte();
    const bool after_literal = std::exchange(literal_, '\0') != '\0';
    if (c == '\\') return escape();
    if (c == '[') return item(char_class());
    if (c == '(') return group();
    if (c == ')') {
      if (groups_.size() == 1) refuse("a ')' too many");
      out_ += std::string(groups_.back().options + 1, ')');
      atom_ = groups_.back().begin, quantified_ = false;
      return groups_.pop_back();
    }
    if (c == '*' || c == '+' || c == '?' || c == '{') return quantifier(c);
    if (c == '|' || c == '^' || c == '$' || c == '.') return item(std::string(1, c));
    at_ = begin;
    const char32_t letter = next_code_point(in_, at_).value();
    if (groups_.back().caseless) refuse_folds(letter, after_literal);
    literal_ = letter < 128 ? static_cast<char>(letter | 0x20) : '?';
    before_ = literal_;
    item(in_.substr(begin, at_ - begin));
  }

  // Oniguruma takes letters without case as the several that they fold to ("ss" for U+00DF), which PCRE2 never does.
  void refuse_folds(char32_t letter, bool after_literal) const {
    utf8proc_int32_t folded[8];
    int boundary = 0;
    const bool several =
        utf8proc_decompose_char(static_cast<utf8proc_int32_t>(letter), folded, 8, UTF8PROC_CASEFOLD, &boundary) > 1;
    const char pair[] = {before_, letter < 128 ? static_cast<char>(letter | 0x20) : '?'};
    constexpr std::string_view kPairs = "ss|ff|fi|fl|st";
    if (several || (after_literal && kPairs.find(std::string_view(pair, 2)) != std::string_view::npos))
      refuse("letters without case, of which a character of several letters exists");
  }

  // A quantifier behind another takes it as a whole: there, `{1,3}+` is a repeated repetition.
  void quantifier(char c) {
    std::string text(1, c);
    bool fixed = false;
    if (c == '{') {
      const std::string_view rest = in_.substr(at_);
      const size_t end = rest.find_first_not_of("0123456789,");
      const std::string_view inside = rest.substr(0, end);
      if (end == std::string_view::npos || rest[end] != '}' || inside.empty() || inside == "," ||
          std::count(inside.begin(), inside.end(), ',') > 1)
        return item("\\{");
      at_ += end + 1;
      fixed = inside.find(',') == std::string_view::npos;
      text = fmt::format("{{{}{}}}", inside[0] == ',' ? "0" : "", inside);
    }
    if (!fixed && eat("?"))
      text += '?';
    else if (c != '{' && eat("+"))
      text += '+';
    if (atom_ == std::string::npos) refuse("a quantifier with nothing before it");
    if (quantified_) out_.insert(atom_, "(?:"), out_ += ')';
    out_ += text;
    quantified_ = true;
  }

  void group() {
    Group group{out_.size(), 0, groups_.back().caseless};
    quantified_ = false, atom_ = std::string::npos;
    if (eat("*")) refuse("'(*'");
    if (eat("?#")) return void(take_until(')'));
    out_ += '(';
    if (const auto* const known = std::ranges::find_if(kGroups, [&](auto begin) { return eat(begin); });
        known != std::end(kGroups)) {
      out_ += *known;
      const char end = *known == "?<" ? '>' : '\'';
      if (known >= std::end(kGroups) - 2) (out_ += take_until(end)) += end;
    } else if (eat("?")) {
      out_ += '?';
      for (bool on = true;;) {
        const char c = take_byte();
        if (c == '-') on = false;
        if (c == 'i') group.caseless = on;
        if (c == ':' || c == ')') {
          out_ += ':';
          if (c == ':') break;
          ++groups_.back().options;
          groups_.back().caseless = group.caseless;
          return;
        }
        if (c != 'i' && c != 'm' && c != '-') refuse(fmt::format("'(?' with '{}'", c));
        out_ += c == 'm' ? 's' : c;
      }
    }
    groups_.push_back(group);
  }

  void escape() {
    const char c = take_byte();
    if (const std::string_view set = set_of(c); !set.empty())
      return item(in_brackets(set == kWord ? kWordAlone : set, is_upper(c)));
    if (c == 'p' || c == 'P') {
      const auto [set, negative] = property(c == 'P');
      // There, a case that is asked for outside of a class is that case, whatever the options say.
      const std::string one = in_brackets(set, negative);
      return item(groups_.back().caseless && is_case(set) ? "(?-i:" + one + ")" : one);
    }
    if (c == 'b' || c == 'B')
      return item(fmt::format("(?:(?<=[{0}])(?{1}[{0}])|(?<![{0}])(?{2}[{0}]))", kWordAlone, c == 'b' ? '!' : '=',
                              c == 'b' ? '=' : '!'));
    if (c == 'O') return item("(?s:.)");
    if (std::string_view("RNKAzZkg").find(c) != std::string_view::npos || (c >= '1' && c <= '9')) {
      item(std::string{'\\', c});
      while (c <= '9' && at_ < in_.size() && in_[at_] >= '0' && in_[at_] <= '9') out_ += in_[at_++];
      if ((c == 'k' || c == 'g') && eat("<")) out_ += fmt::format("<{}>", take_until('>'));
      return;
    }
    item(character(c));
  }

  static std::string_view set_of(char c) {
    for (const auto& [name, set] : kSets)
      if (name == (c | 0x20)) return set;
    return {};
  }
  static bool is_case(std::string_view set) { return kCases.find(set) != std::string_view::npos; }
  static bool is_upper(char c) { return c >= 'A' && c <= 'Z'; }
  static std::string in_brackets(std::string_view set, bool negative) {
    return fmt::format("[{}{}]", negative ? "^" : "", set);
  }

  // One character by its escape, outside of a class and inside.
  std::string character(char c) {
    if (c == 'v') return "\\x0B";
    if (c == 'c') return {'\\', 'c', take_byte()};
    if (c == 'u' || c == 'x') {
      const bool braces = c == 'x' && eat("{");
      std::string digits;
      if (braces) {
        digits = take_until('}');
      } else {
        while (digits.size() < (c == 'u' ? 4U : 2U) && at_ < in_.size() && is_hex(in_[at_])) digits += in_[at_++];
      }
      if (digits.empty() || digits.size() > 6 || !std::all_of(digits.begin(), digits.end(), is_hex) ||
          (c == 'u' && digits.size() != 4) || (c == 'x' && !braces && std::stoi(digits, nullptr, 16) > 0x7F))
        refuse(fmt::format("'\\{}' without the number of a character", c));
      return fmt::format("\\x{{{}}}", digits);
    }
    if ((is_upper(c) || (c >= 'a' && c <= 'z')) && std::string_view("tnrfae").find(c) == std::string_view::npos)
      refuse(fmt::format("'\\{}'", c));
    if (static_cast<unsigned char>(c) < 0x80) return {'\\', c};
    size_t begin = --at_;
    next_code_point(in_, at_);
    return std::string(in_.substr(begin, at_ - begin));
  }
  static bool is_hex(char c) { return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'f') || (c >= 'A' && c <= 'F'); }

  // The set of \p{name}, and whether what is not in it is meant.
  std::pair<std::string, bool> property(bool negative) {
    if (!eat("{")) refuse("'\\p' without '{'");
    if (eat("^")) negative = !negative;
    return {named(take_until('}')), negative};
  }
  static std::string named(std::string_view spelling) {
    std::string name;
    for (const char c : spelling)
      if (c != '_' && c != '-' && c != ' ') name += is_upper(c) ? static_cast<char>(c | 0x20) : c;
    for (const auto& [known, set] : kClasses)
      if (known == name) return std::string(set);
    // A name of PCRE2: a script (there, alone it would be Script_Extensions), a short category or a property.
    int error = 0;
    size_t place = 0;
    for (const std::string& set : {fmt::format("\\p{{sc:{}}}", name), fmt::format("\\p{{{}}}", name)})
      if (std::all_of(name.begin(), name.end(), [](char c) { return c >= 'a' && c <= 'z'; }) &&
          compiled(set, 0, error, place))
        return set;
    refuse(fmt::format("the class '{}'", spelling));
  }

  // The rest of a class, behind its "[": a class inside it and "&&" are Oniguruma's alone.
  std::string char_class() {
    const bool negative = eat("^");
    std::string both, set;  // what stands before "&&" must hold too
    std::vector<std::string> more;
    const auto any = [&] {
      std::string out = set.empty() && !more.empty() ? "" : set.empty() ? "(?!)" : in_brackets(set, false);
      for (const std::string& m : more) out += (out.empty() ? "" : "|") + m;
      set.clear(), more.clear();
      return out;
    };
    const auto add = [&](std::string_view part, bool inverse) {
      if (groups_.back().caseless && is_case(part)) refuse("a case inside of a class without case");
      inverse ? more.push_back(in_brackets(part, true)) : void(set += part);
    };
    for (bool first = true;; first = false) {
      if (!first && eat("]")) break;
      if (eat("&&")) {
        both += fmt::format("(?={})", any());
      } else if (eat("[:")) {
        const bool inverse = eat("^");
        const std::string_view name = take_until(':');
        if (!eat("]")) refuse("'[:' without ':]'");
        add(named(name == "punct" ? "posixpunct" : name), inverse);
      } else if (eat("[")) {
        more.push_back(char_class());
      } else if (eat("\\")) {
        const char c = take_byte();
        if (const std::string_view known = set_of(c); !known.empty()) {
          add(known, is_upper(c));
        } else if (c == 'p' || c == 'P') {
          const auto [known_set, inverse] = property(c == 'P');
          add(known_set, inverse);
        } else {
          set += c == 'b' ? "\\x08" : character(c);
        }
      } else {
        const char c = take_byte();
        set += c == '^' || c == ']' ? std::string{'\\', c} : std::string(1, c);
      }
    }
    if (both.empty() && more.empty()) return in_brackets(set, negative);
    const std::string one = fmt::format("(?:{}(?:{}))", both, any());
    return negative ? fmt::format("(?:(?!{})(?s:.))", one) : one;
  }

  std::string_view in_;
  size_t at_ = 0;
  std::string out_;
  size_t atom_ = std::string::npos;  // the begin of what a quantifier would repeat
  bool quantified_ = false;
  char literal_ = '\0', before_ = '\0';
  std::vector<Group> groups_{{0, 0, false}};
};

// The beginning of a character, at this byte or behind it.
size_t character_from(std::string_view text, size_t at) {
  while (at < text.size() && (static_cast<unsigned char>(text[at]) & 0xC0) == 0x80) ++at;
  return at;
}

double processor_seconds() {
  timespec now{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

}  // namespace

struct Matching::State {
  std::unique_ptr<pcre2_match_data, decltype(&pcre2_match_data_free)> data{pcre2_match_data_create(1, nullptr),
                                                                           &pcre2_match_data_free};
  std::unique_ptr<pcre2_match_context, decltype(&pcre2_match_context_free)> context{pcre2_match_context_create(nullptr),
                                                                                    &pcre2_match_context_free};
  double limit_s, until;
  size_t calls = 0;
};

Matching::Matching(size_t bytes) : state_(new State) {
  state_->limit_s = 2 + 5e-6 * static_cast<double>(bytes);
  state_->until = processor_seconds() + state_->limit_s;
  pcre2_set_match_limit(state_->context.get(), kMostSteps);
  pcre2_set_heap_limit(state_->context.get(), kMostHeap);
}
Matching::~Matching() = default;

struct Split::Code {
  CodePointer code;
  std::string pattern;
};

Split::Split(std::string_view pattern, bool literal, Behaviour behaviour, bool invert)
    : behaviour_(behaviour), invert_(invert) {
  const std::string ours = literal ? std::string(pattern) : Translation(pattern).take();
  int error = 0;
  size_t at = 0;
  CodePointer code = compiled(ours, literal ? PCRE2_LITERAL : PCRE2_UCP | PCRE2_MULTILINE, error, at);
  if (!code) {
    PCRE2_UCHAR why[200];
    pcre2_get_error_message(error, why, sizeof why);
    throw Error(reinterpret_cast<const char*>(why));
  }
  pcre2_jit_compile(code.get(), PCRE2_JIT_COMPLETE);  // without a JIT, pcre2_match() interprets: the same, slower
  code_ = std::make_shared<const Code>(Code{std::move(code), std::string(pattern)});
}

Split Split::of_regex(std::string_view regex, Behaviour behaviour, bool invert) {
  return {regex, false, behaviour, invert};
}
Split Split::of_text(std::string_view text, Behaviour behaviour, bool invert) {
  return {text, true, behaviour, invert};
}

// The first match at `from` or behind it.
bool Split::match(std::string_view text, size_t from, Matching& matching, size_t& begin, size_t& end) const {
  Matching::State& s = *matching.state_;
  const auto* const subject = reinterpret_cast<PCRE2_SPTR>(text.data());
  const auto run = [&](uint32_t options) {
    return pcre2_match(code_->code.get(), subject, text.size(), from, PCRE2_NO_UTF_CHECK | options, s.data.get(),
                       s.context.get());
  };
  for (;;) {
    const size_t last = std::min(text.size(), from + kTried);
    pcre2_set_offset_limit(s.context.get(), last);
    int count = run(0);
    if (count == PCRE2_ERROR_JIT_STACKLIMIT) count = run(PCRE2_NO_JIT);
    const bool late = ++s.calls % kTried == 0 && processor_seconds() > s.until;
    if (late || (count < 0 && count != PCRE2_ERROR_NOMATCH))
      throw Error(fmt::format("the pattern '{}' takes too long or too much memory at byte {} of a text of {} bytes",
                              code_->pattern, from, text.size()));
    if (count >= 0) {
      const size_t* const place = pcre2_get_ovector_pointer(s.data.get());
      begin = place[0], end = std::max(place[0], place[1]);
      return true;
    }
    if (last == text.size()) return false;
    from = character_from(text, last);
  }
}

// Calls f(begin, end, whether it matches) for the parts of a text that is UTF-8. As there, a match of nothing right
// behind a match does not count.
template <class F>
void Split::each(std::string_view text, Matching& matching, const F& f) const {
  size_t done = 0, begin = 0, end = 0;
  bool any = false;
  for (size_t from = 0; from <= text.size() && match(text, from, matching, begin, end);) {
    if (begin == end && any && end == done) {
      if (from == text.size()) break;
      from = character_from(text, from + 1);
      continue;
    }
    any = true;
    if (begin > done) f(done, begin, false);
    f(begin, end, true);
    from = done = end;
  }
  if (done < text.size()) f(done, text.size(), false);
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
  size_t first = 0, last = 0;  // the piece that may still grow
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
  static const Split gpt2 = Split::of_regex(kGpt2);
  Matching matching(text.size());
  gpt2.pieces(text, matching, f);
}

bool is_word(char32_t c) {
  static const Split word = Split::of_regex(fmt::format("[{}]", kLibraryWord));
  std::string text;
  append_utf8(text, c);
  Matching matching(text.size());
  return word.replaced(text, matching, "").empty();
}

}  // namespace tessera::bpe
