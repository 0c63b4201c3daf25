// From text to tokens, with blanks as transformers' environment treats them (trim_blocks, lstrip_blocks).
#include <fmt/format.h>

#include <algorithm>
#include <cctype>
#include <charconv>

#include "data/jinja/syntax.h"
#include "data/utf8.h"

namespace tessera::jinja {
namespace {

constexpr size_t kMostBytes = size_t{1} << 20;

class Lexer {
 public:
  Lexer(std::string_view source, const std::string& what) : what_(what) {
    if (source.size() > kMostBytes) fail("a template of more than 1 MiB");
    for (size_t i = 0; i < source.size(); ++i)
      if (source[i] != '\r')
        s_ += source[i];
      else if (source.substr(i + 1, 1) != "\n")
        s_ += '\n';
    if (s_.ends_with('\n')) s_.pop_back();
    if (find_invalid_utf8(s_) != std::string::npos) fail("not UTF-8");
  }

  std::vector<Token> run() {
    while (at_ < s_.size()) {
      size_t open = s_.find('{', at_);
      while (open != std::string::npos && !is_one_of("{%#", open + 1)) open = s_.find('{', open + 1);
      if (open == std::string::npos) break;
      const size_t begin = std::exchange(at_, open + 2);
      const char kind = s_[open + 1];
      add_text(begin, open, sign(), kind != '{');
      if (kind == '#') {
        while (!closes('#')) advance("comment");
      } else if (kind == '{') {
        code(Kind::output, '}');
      } else if (!raw()) {
        code(Kind::block, '%');
      }
    }
    add(Kind::text, s_.substr(at_));
    add(Kind::end, "the end of the template");
    return std::move(out_);
  }

 private:
  [[noreturn]] void fail(std::string_view why) {
    fail_at(what_, 1 + static_cast<int>(std::count(s_.begin(), s_.begin() + static_cast<std::ptrdiff_t>(at_), '\n')),
            why);
  }
  bool is_one_of(std::string_view characters, size_t at) const {
    return at < s_.size() && characters.find(s_[at]) != std::string_view::npos;
  }
  bool stands(std::string_view text) const { return std::string_view(s_).substr(at_).starts_with(text); }
  bool skip(std::string_view text) {
    const bool there = stands(text);
    at_ += there ? text.size() : 0;
    return there;
  }
  void advance(std::string_view within) {
    if (at_ >= s_.size()) fail(fmt::format("the template ends in a {}", within));
    ++at_;
  }
  void skip_space() { at_ = s_.size() - stripped(std::string_view(s_).substr(at_), true, false).size(); }
  char sign() { return is_one_of("-+", at_) ? s_[at_++] : '\0'; }

  void add(Kind kind, std::string text) {
    line_ += static_cast<int>(std::count(s_.begin() + static_cast<std::ptrdiff_t>(counted_),
                                         s_.begin() + static_cast<std::ptrdiff_t>(at_), '\n'));
    counted_ = at_;
    if (kind != Kind::text || !text.empty()) out_.push_back({kind, std::move(text), line_});
  }
  // The text before a tag, without the blanks that the tag's sign or lstrip_blocks take.
  void add_text(size_t begin, size_t end, char sign, bool block) {
    std::string_view text = std::string_view(s_).substr(begin, end - begin);
    const size_t line = text.rfind('\n') + 1;
    const bool begins_line = line > 0 || begin == 0 || s_[begin - 1] == '\n';
    if (sign == '-')
      text = stripped(text, false, true);
    else if (sign == '\0' && block && begins_line && stripped(text.substr(line), true, false).empty())
      text = text.substr(0, line);
    add(Kind::text, std::string(text));
  }
  // Goes behind "%}", "}}" or "#}" and its sign, and what these take of the text behind.
  bool closes(char c) {
    const std::string end{c, '}'};
    if (skip("-" + end)) {
      skip_space();
      return true;
    }
    if (c != '}' && skip("+" + end)) return true;
    if (!skip(end)) return false;
    if (c != '}') skip("\n");
    return true;
  }
  bool raw() {
    const size_t before = at_;
    skip_space();
    const bool named = skip("raw");
    skip_space();
    if (named && skip("-%}"))
      skip_space();
    else if (!named || !skip("%}"))
      return at_ = before, false;
    for (const size_t begin = at_;; advance("raw block")) {
      const size_t end = at_;
      if (!skip("{%")) continue;
      const char with = sign();
      skip_space();
      if (skip("endraw")) {
        skip_space();
        if (closes('%')) return add_text(begin, end, with, true), true;
      }
      at_ = end;
    }
  }

  void code(Kind kind, char end) {
    add(kind, "");
    std::string open;
    for (;;) {
      skip_space();
      if (at_ == s_.size()) fail("the template ends in a tag");
      if (open.empty() && closes(end)) break;
      const size_t begin = at_;
      const auto digit = [&](size_t at) { return is_one_of("0123456789", at); };
      const auto digits = [&] {
        while (digit(at_)) ++at_;
      };
      const auto letter = [&] { return is_one_of("_", at_) || std::isalnum(s_[at_]) != 0 || (s_[at_] & 0x80) != 0; };
      const auto made = [&] { return s_.substr(begin, at_ - begin); };
      if (digit(at_)) {
        digits();
        const bool whole = s_[begin - 1] == '.' || (!is_one_of("eE", at_) && !(is_one_of(".", at_) && digit(at_ + 1)));
        if (!whole) {
          if (skip(".")) digits();
          if (is_one_of("eE", at_)) ++at_, sign(), digits();
        }
        if (letter()) fail("a number of a form that is not known");
        add(whole ? Kind::integer : Kind::real, made());
      } else if (letter()) {
        while (at_ < s_.size() && letter()) ++at_;
        add(Kind::name, made());
      } else if (is_one_of("'\"", at_)) {
        for (advance("text"); s_[at_] != s_[begin]; advance("text"))
          if (s_[at_] == '\\') advance("text");
        ++at_;
        add(Kind::string, unescaped(s_.substr(begin + 1, at_ - begin - 2)));
      } else {
        for (const char* const two : {"//", "**", "==", "!=", ">=", "<="})
          if (at_ == begin) skip(two);
        if (at_ == begin && !is_one_of("+-/*%~[](){}><=.:|,", at_++)) fail("a character that is not known");
        const std::string sign = made();
        if (is_one_of("([{", begin)) open += sign == "(" ? ')' : sign == "[" ? ']' : '}';
        if (is_one_of(")]}", begin)) {
          if (open.empty() || open.back() != sign[0]) fail(fmt::format("'{}' closes nothing", sign));
          open.pop_back();
        }
        add(Kind::sign, sign);
      }
    }
    add(kind == Kind::output ? Kind::output_end : Kind::block_end, "the end of the tag");
  }

  std::string unescaped(std::string_view text) {
    std::string out;
    for (size_t i = 0; i < text.size(); ++i) {
      if (text[i] != '\\') {
        out += text[i];
        continue;
      }
      constexpr std::string_view kNames = "\\'\"abfnrtv", kMeant = "\\'\"\a\b\f\n\r\t\v";
      const char c = text[++i];
      const size_t digits = c == 'x' ? 2 : c == 'u' ? 4 : c == 'U' ? 8 : 0;
      if (const size_t found = kNames.find(c); found != std::string_view::npos) {
        out += kMeant[found];
      } else if (digits > 0) {
        uint32_t point = 0;
        const std::string_view hex = text.substr(i + 1, digits);
        const auto [end, error] = std::from_chars(hex.begin(), hex.end(), point, 16);
        if (hex.size() != digits || end != hex.end() || point > 0x10FFFF || (point >= 0xD800 && point < 0xE000))
          fail(fmt::format("the escape \\{} is not complete, or no character", c));
        append_utf8(out, point);
        i += digits;
      } else if (c == 'N' || (c >= '0' && c <= '7')) {
        fail(fmt::format("the escape \\{} is not known", c));
      } else if (c != '\n') {
        (out += '\\') += c;
      }
    }
    return out;
  }

  const std::string& what_;
  std::string s_ = {};
  size_t at_ = 0, counted_ = 0;
  int line_ = 1;
  std::vector<Token> out_ = {};
};

}  // namespace

void fail_at(const std::string& what, int line, std::string_view why) {
  throw InputError(fmt::format("{}:{}: {}", what, line, escape_broken(why.substr(0, 500))));
}

std::vector<Token> tokens_of(std::string_view source, const std::string& what) { return Lexer(source, what).run(); }

}  // namespace tessera::jinja
