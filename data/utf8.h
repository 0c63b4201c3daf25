// UTF-8, strictly: no overlong forms, no surrogates, nothing beyond U+10FFFF.
#pragma once
#include <cstddef>
#include <optional>
#include <string>
#include <string_view>

namespace tessera {

// The code point at `position`, which is moved past it; nothing (and `position` stays) where the bytes are not UTF-8.
std::optional<char32_t> next_code_point(std::string_view bytes, size_t& position);

// Appends a code point's one to four bytes.
void append_utf8(std::string& out, char32_t code_point);

// Offset of the first byte that is not part of valid UTF-8, or npos. Cost: one pass.
size_t find_invalid_utf8(std::string_view bytes);

// How many bytes from `position` on are the beginning of a character that is not whole; 0 where no character begins so.
size_t begun_character(std::string_view bytes, size_t position);

// The text with U+FFFD for everything that is not UTF-8: one for each byte that begins no character, and one for each
// beginning of a character that is not whole, as Python and Rust do (the Unicode Standard, 3.9, "maximal subparts").
std::string replace_broken(std::string_view bytes);

}  // namespace tessera
