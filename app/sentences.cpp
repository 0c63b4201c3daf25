// Where sentences begin and end.
#include "app/sentences.h"

#include <cctype>
#include <string_view>

namespace tessera {
namespace {

bool is_space(char c) { return c == ' ' || c == '\n' || c == '\r' || c == '\t'; }
bool is_capital(char c) { return c >= 'A' && c <= 'Z'; }

// Titles end with a point, and no sentence with them.
bool is_title(std::string_view before_point) {
  for (const std::string_view title : {"Mr", "Mrs", "Ms", "Dr", "St", "Esq"})
    if (before_point.ends_with(title) &&
        (before_point.size() == title.size() ||
         !std::isalpha(static_cast<unsigned char>(before_point[before_point.size() - title.size() - 1]))))
      return true;
  return false;
}

// Behind the end of the sentence that ends at `at`, or 0.
size_t end_at(std::string_view text, size_t at) {
  if (text[at] != '.' && text[at] != '!' && text[at] != '?') return 0;
  if (text[at] == '.' && is_title(text.substr(0, at))) return 0;
  size_t end = at + 1;
  while (end < text.size() && (text[end] == '"' || text[end] == '\'' || text[end] == ')' || text[end] == '_')) ++end;
  return end == text.size() || is_space(text[end]) ? end : 0;
}

// Where the next sentence begins behind `end`, or npos.
size_t begin_behind(std::string_view text, size_t end) {
  size_t begin = end;
  while (begin < text.size() && is_space(text[begin])) ++begin;
  const size_t word = begin < text.size() && (text[begin] == '"' || text[begin] == '\'') ? begin + 1 : begin;
  return word < text.size() && is_capital(text[word]) ? begin : std::string_view::npos;
}

}  // namespace

std::string whole_sentences(const std::string& text) {
  size_t first = std::string::npos, last = 0;
  for (size_t i = 0; i < text.size(); ++i) {
    const size_t end = end_at(text, i);
    if (end == 0) continue;
    if (first == std::string::npos)
      first = begin_behind(text, end);
    else
      last = end;
  }
  return first != std::string::npos && last > first && 3 * (last - first) >= text.size()
             ? text.substr(first, last - first)
             : text;
}

}  // namespace tessera
