// Texts as Python takes them.
#include <utf8proc.h>

#include "data/jinja/value.h"
#include "data/utf8.h"

namespace tessera::jinja {

std::u32string code_points(std::string_view text) {
  std::u32string out;
  for (size_t at = 0; at < text.size();) {
    const auto c = next_code_point(text, at);
    if (!c) throw InputError("a text is not UTF-8");
    out += *c;
  }
  return out;
}

std::string utf8(std::u32string_view points) {
  std::string out;
  for (const char32_t c : points) append_utf8(out, c);
  return out;
}

bool is_space(char32_t c) {
  return (c >= 9 && c <= 13) || (c >= 28 && c <= 32) || c == 0x85 || c == 0xA0 || c == 0x1680 ||
         (c >= 0x2000 && c <= 0x200A) || c == 0x2028 || c == 0x2029 || c == 0x202F || c == 0x205F || c == 0x3000;
}

std::string_view stripped(std::string_view text, bool left, bool right, const std::string* characters) {
  const std::u32string given = characters ? code_points(*characters) : U"";
  const auto goes = [&](size_t at) {
    const char32_t c = next_code_point(text, at).value_or(0xFFFD);
    return characters ? given.find(c) != std::u32string::npos : is_space(c);
  };
  const auto continues = [&](size_t at) { return (static_cast<unsigned char>(text[at]) & 0xC0) == 0x80; };
  size_t begin = 0;
  while (left && begin < text.size() && goes(begin)) next_code_point(text, begin);
  text.remove_prefix(begin);
  while (right && !text.empty()) {
    size_t last = text.size() - 1;
    while (last > 0 && continues(last)) --last;
    if (!goes(last)) break;
    text = text.substr(0, last);
  }
  return text;
}

std::string lower(std::string_view s) {
  std::u32string points = code_points(s);
  for (char32_t& c : points) c = static_cast<char32_t>(utf8proc_tolower(static_cast<utf8proc_int32_t>(c)));
  return utf8(points);
}
std::string upper(std::string_view s) {
  std::u32string out;
  for (const char32_t c : code_points(s))
    if (c == U'\u00DF')
      out += U"SS";
    else
      out += static_cast<char32_t>(utf8proc_toupper(static_cast<utf8proc_int32_t>(c)));
  return utf8(out);
}
std::string titled(std::string_view s, bool (*begins)(char32_t before)) {
  std::u32string points = code_points(s);
  char32_t before = 0;
  for (char32_t& c : points) {
    const auto point = static_cast<utf8proc_int32_t>(c);
    const bool first = begins(std::exchange(before, c));
    c = static_cast<char32_t>(first ? utf8proc_totitle(point) : utf8proc_tolower(point));
  }
  return utf8(points);
}
bool is_letter(char32_t c) {
  const auto point = static_cast<utf8proc_int32_t>(c);
  return utf8proc_tolower(point) != point || utf8proc_toupper(point) != point;
}

std::vector<std::string> lines_of(std::string_view s) {
  std::vector<std::string> out;
  std::u32string line;
  const std::u32string points = code_points(s);
  for (size_t i = 0; i < points.size(); ++i) {
    const bool ends =
        std::u32string_view(U"\n\r\v\f\x1c\x1d\x1e\x85\u2028\u2029").find(points[i]) != std::u32string_view::npos;
    if (!ends) line += points[i];
    if (ends || i + 1 == points.size()) out.push_back(utf8(std::exchange(line, {})));
    if (points[i] == '\r' && i + 1 < points.size() && points[i + 1] == '\n') ++i;
  }
  return out;
}

std::string replaced(Work& work, const std::string& s, const std::string& old, const std::string& by, int64_t most) {
  std::string out;
  size_t begin = 0;
  for (size_t at = 0; most != 0 && at <= s.size(); --most) {
    const size_t found = s.find(old, at);
    if (found == std::string::npos) break;
    out.append(s, begin, found - begin).append(by);
    work.charge(by.size() + 1);
    begin = found + old.size();
    at = begin;
    if (old.empty()) {
      if (at == s.size()) break;
      next_code_point(s, at);
    }
  }
  return out.append(s, begin);
}

}  // namespace tessera::jinja
