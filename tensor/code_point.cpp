// Decoding of UTF-8, and what is shown for the rest.
#include "tensor/code_point.h"

namespace tessera {

std::optional<char32_t> next_code_point(std::string_view bytes, size_t& position) {
  if (position >= bytes.size()) return std::nullopt;
  const auto byte = [&](size_t i) { return static_cast<char32_t>(static_cast<unsigned char>(bytes[i])); };
  const char32_t lead = byte(position);
  if (lead < 0x80) return ++position, lead;
  const size_t length = lead >= 0xF0 ? 4 : lead >= 0xE0 ? 3 : 2;
  if (lead < 0xC2 || lead > 0xF4 || bytes.size() - position < length) return std::nullopt;
  char32_t c = lead & (0xFFu >> (length + 1));
  for (size_t i = 1; i < length; ++i) {
    if ((byte(position + i) & 0xC0) != 0x80) return std::nullopt;
    c = c << 6 | (byte(position + i) & 0x3F);
  }
  const char32_t least = length == 4 ? 0x10000 : length == 3 ? 0x800 : 0x80;
  if (c < least || c > 0x10FFFF || (c >= 0xD800 && c <= 0xDFFF)) return std::nullopt;
  position += length;
  return c;
}

void append_escaped(std::string& out, char byte) {
  constexpr std::string_view digits = "0123456789abcdef";
  const auto bits = static_cast<unsigned char>(byte);
  out.append("\\x").append({digits[bits >> 4U], digits[bits & 15U]});
}

}  // namespace tessera
