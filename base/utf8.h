// UTF-8 text.
#pragma once
#include <algorithm>
#include <optional>
#include <string>
#include <string_view>

namespace tessera {

// Strict UTF-8: no overlong forms, no surrogates, nothing beyond U+10FFFF.

// Returns the code point at `position` and advances past it; nullopt, without advancing, if the bytes are not UTF-8.
std::optional<char32_t> next_code_point(std::string_view bytes, size_t& position);

// Appends `\xe9` for a byte of invalid UTF-8 or an invisible character.
void append_escaped(std::string& out, char byte);

void append_utf8(std::string& out, char32_t code_point);

// npos if all bytes are valid. Cost: one pass.
size_t find_invalid_utf8(std::string_view bytes);

// Number of bytes at `position` that begin but do not complete a character, or 0.
size_t begun_character(std::string_view bytes, size_t position);

// Unicode White_Space.
bool is_white_space(char32_t c);

size_t last_character(std::string_view text);

// Strips characters for which `goes` returns true.
template <class F>
std::string_view stripped(std::string_view text, bool left, bool right, const F& goes) {
  const auto taken = [&](size_t at, size_t& end) { return goes(next_code_point(text, end = at).value_or(0xFFFD)); };
  for (size_t end = 0; left && !text.empty() && taken(0, end);) text.remove_prefix(std::max<size_t>(end, 1));
  for (size_t end = 0; right && !text.empty() && taken(last_character(text), end);)
    text = text.substr(0, last_character(text));
  return text;
}

// Replaces each byte that begins no character, and each incomplete character, by U+FFFD, as in Python and Rust (Unicode
// Standard 3.9, "maximal subparts").
std::string replace_broken(std::string_view bytes);
// Escapes every invalid byte as `\xe9`, for display.
std::string escape_broken(std::string_view bytes);

// A string of JSON and TOML, with quotes.
std::string quoted_text(std::string_view text);

}  // namespace tessera
