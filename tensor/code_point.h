// UTF-8, strictly: no overlong forms, no surrogates, nothing beyond U+10FFFF.
#pragma once
#include <cstddef>
#include <optional>
#include <string>
#include <string_view>

namespace tessera {

// The code point at `position`, which is moved past it; nothing (and `position` stays) where the bytes are not UTF-8.
std::optional<char32_t> next_code_point(std::string_view bytes, size_t& position);

// Adds a byte as `\xe9`, for what is not UTF-8 or would not be seen.
void append_escaped(std::string& out, char byte);

}  // namespace tessera
