// Texts of UTF-8, which tensor/error.h reads.
#pragma once
#include <algorithm>

#include "tensor/error.h"

namespace tessera {

// Appends a code point's one to four bytes.
void append_utf8(std::string& out, char32_t code_point);

// Offset of the first byte that is not part of valid UTF-8, or npos. Cost: one pass.
size_t find_invalid_utf8(std::string_view bytes);

// How many bytes from `position` on are the beginning of a character that is not whole; 0 where no character begins so.
size_t begun_character(std::string_view bytes, size_t position);

// White space by Unicode's property.
bool is_white_space(char32_t c);

// The beginning of the last character of a text that is not empty.
size_t last_character(std::string_view text);

// The text without the characters at its beginning, or at its end, that `goes` takes.
template <class F>
std::string_view stripped(std::string_view text, bool left, bool right, const F& goes) {
  const auto taken = [&](size_t at, size_t& end) { return goes(next_code_point(text, end = at).value_or(0xFFFD)); };
  for (size_t end = 0; left && !text.empty() && taken(0, end);) text.remove_prefix(std::max<size_t>(end, 1));
  for (size_t end = 0; right && !text.empty() && taken(last_character(text), end);)
    text = text.substr(0, last_character(text));
  return text;
}

// The text with U+FFFD for everything that is not UTF-8: one for each byte that begins no character, and one for each
// beginning of a character that is not whole, as Python and Rust do (the Unicode Standard, 3.9, "maximal subparts").
std::string replace_broken(std::string_view bytes);
// The same with every byte that is not UTF-8 as `\xe9`, for people to read.
std::string escape_broken(std::string_view bytes);

}  // namespace tessera
