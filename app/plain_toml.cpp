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

// What has been read of a line.
struct Line {
  int equals = 0;
  char last = '\n';  // that is not blank; the quote of a string

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

}  // namespace

void check_plain_toml(std::string_view toml, const std::string& path) {
  Line line;
  size_t at = toml.starts_with("\xEF\xBB\xBF") ? 3 : 0;
  while (at < toml.size()) {
    const char c = toml[at];
    const std::string_view found = not_plain(toml.substr(at), line);
    if (!found.empty()) {
      const std::string_view before = toml.substr(0, at);
      const auto lines = std::count(before.begin(), before.end(), '\n');
      throw Error(
          fmt::format("{}:{}:{}: expected KEY = VALUE, found {}", path, lines + 1, at - before.rfind('\n'), found));
    }
    line.add(c);
    if (c == '"' || c == '\'')
      at = end_of_string(toml, at);
    else if (c == '#')
      at = std::min(toml.find('\n', at), toml.size());
    else
      ++at;
  }
}

}  // namespace tessera
