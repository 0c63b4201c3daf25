// A walk over TOML that knows strings and comments, and nothing else.
#include "app/plain_toml.h"

#include <fmt/format.h>

#include <algorithm>

#include "tensor/error.h"

namespace tessera {
namespace {

// Behind the string whose first quote is at `at`; when it is not closed, the end of its line.
size_t end_of_string(std::string_view toml, size_t at) {
  const char quote = toml[at];
  for (++at; at < toml.size(); ++at) {
    if (toml[at] == quote) return at + 1;
    if (toml[at] == '\n') return at;
    if (toml[at] == '\\' && quote == '"' && at + 1 < toml.size() && toml[at + 1] != '\n') ++at;
  }
  return toml.size();
}

constexpr size_t kNone = std::string_view::npos;

bool is_blank(char c) { return c == ' ' || c == '\t' || c == '\r' || c == '\n'; }

// What has been read of a line.
struct Line {
  int equals = 0;
  char last = '\n';      // that is not blank; the quote of a string
  size_t value = kNone;  // where a value without quotes began that has not ended

  bool value_begins_with(char c) const {
    return equals == 1 && last == '=' && !is_blank(c) && c != '"' && c != '\'' && c != '#' && c != '=';
  }

  // A string is all of a key or all of a value.
  bool string_may_begin() const { return (equals == 0 && last == '\n') || (equals == 1 && last == '='); }
  void add(char c) {
    if (c == '\n') *this = {};
    if (c == ' ' || c == '\t') return;
    equals += c == '=';
    last = c;
  }
};

// What begins at the front of `rest`, outside strings and comments, when no configuration has it; else nothing.
std::string_view not_plain(std::string_view rest, const Line& line) {
  const char c = rest.front();
  if (rest.starts_with("\"\"\"") || rest.starts_with("'''")) return "a string of several lines";
  if ((c == '"' || c == '\'') && !line.string_may_begin()) return "a string inside something else";
  if (c == '[') return "'[': a table or a list";
  if (c == '{') return "'{': a table";
  if (c == ':') return "':': a time";
  if (c == '-' && line.equals > 0 && line.last >= '0' && line.last <= '9') return "'-' behind a digit: a date";
  if (c == '.' && line.equals == 0) return "'.' in a key: a table";
  return static_cast<unsigned char>(c) >= 0x80 ? "a character beyond ASCII outside a string" : "";
}

bool all_of(std::string_view text, const char* set) {
  return !text.empty() && text.find_first_not_of(set) == std::string_view::npos;
}

// A word, or a number: what a value without quotes may be. Whether it is a good one is for the parser to say.
bool is_plain_value(std::string_view value) {
  constexpr const char* kDigits = "0123456789_";
  if (value.starts_with('+') || value.starts_with('-')) value.remove_prefix(1);
  if (all_of(value, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ")) return true;
  if (value.starts_with("0x") || value.starts_with("0o") || value.starts_with("0b"))
    return all_of(value.substr(2), "0123456789abcdefABCDEF_");
  if (const size_t e = value.find_first_of("eE"); e != std::string_view::npos) {
    std::string_view exponent = value.substr(e + 1);
    if (exponent.starts_with('+') || exponent.starts_with('-')) exponent.remove_prefix(1);
    if (!all_of(exponent, kDigits)) return false;
    value = value.substr(0, e);
  }
  const size_t point = value.find('.');
  return all_of(value.substr(0, point), kDigits) &&
         (point == std::string_view::npos || all_of(value.substr(point + 1), kDigits));
}

[[noreturn]] void refuse(std::string_view toml, size_t at, const std::string& path, std::string_view found) {
  const std::string_view before = toml.substr(0, at);
  const auto lines = std::count(before.begin(), before.end(), '\n');
  throw Error(fmt::format("{}:{}:{}: expected KEY = VALUE, found {}", path, lines + 1, at - before.rfind('\n'), found));
}

}  // namespace

void check_plain_toml(std::string_view toml, const std::string& path) {
  Line line;
  size_t at = toml.starts_with("\xEF\xBB\xBF") ? 3 : 0;
  while (at < toml.size()) {
    const char c = toml[at];
    const std::string_view found = not_plain(toml.substr(at), line);
    if (!found.empty()) refuse(toml, at, path, found);
    if (line.value_begins_with(c)) line.value = at;
    line.add(c);
    if (c == '"' || c == '\'')
      at = end_of_string(toml, at);
    else if (c == '#')
      at = std::min(toml.find('\n', at), toml.size());
    else
      ++at;
    if (line.value == kNone || (at < toml.size() && !is_blank(toml[at]) && toml[at] != '#')) continue;
    if (!is_plain_value(toml.substr(line.value, at - line.value)))
      refuse(toml, line.value, path, "a value that is no string, no number and no word");
    line.value = kNone;
  }
}

}  // namespace tessera
