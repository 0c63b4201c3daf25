// Decoding and encoding of UTF-8.
#include "base/utf8.h"

#include <fmt/format.h>

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
  const char32_t min_code_point = length == 4 ? 0x10000 : length == 3 ? 0x800 : 0x80;
  if (c < min_code_point || c > 0x10FFFF || (c >= 0xD800 && c <= 0xDFFF)) return std::nullopt;
  position += length;
  return c;
}

void append_escaped(std::string& out, char byte) {
  constexpr std::string_view digits = "0123456789abcdef";
  const auto bits = static_cast<unsigned char>(byte);
  out.append("\\x").append({digits[bits >> 4U], digits[bits & 15U]});
}

void append_utf8(std::string& out, char32_t c) {
  const auto tail = [&](int shift) { out.push_back(static_cast<char>(0x80 | ((c >> shift) & 0x3F))); };
  if (c < 0x80) {
    out.push_back(static_cast<char>(c));
  } else if (c < 0x800) {
    out.push_back(static_cast<char>(0xC0 | c >> 6)), tail(0);
  } else if (c < 0x10000) {
    out.push_back(static_cast<char>(0xE0 | c >> 12)), tail(6), tail(0);
  } else {
    out.push_back(static_cast<char>(0xF0 | c >> 18)), tail(12), tail(6), tail(0);
  }
}

size_t find_invalid_utf8(std::string_view bytes) {
  size_t position = 0;
  while (position < bytes.size())
    if (!next_code_point(bytes, position)) return position;
  return std::string_view::npos;
}

bool is_white_space(char32_t c) {
  return (c >= 0x9 && c <= 0xD) || c == 0x20 || c == 0x85 || c == 0xA0 || c == 0x1680 || (c >= 0x2000 && c <= 0x200A) ||
         c == 0x2028 || c == 0x2029 || c == 0x202F || c == 0x205F || c == 0x3000;
}

size_t last_character(std::string_view text) {
  size_t at = text.size() - 1;
  while (at > 0 && (static_cast<unsigned char>(text[at]) & 0xC0) == 0x80) --at;
  return at;
}

size_t begun_character(std::string_view bytes, size_t position) {
  const auto byte = [&](size_t i) { return static_cast<unsigned char>(bytes[i]); };
  if (position >= bytes.size()) return 0;
  const unsigned char lead = byte(position);
  if (lead < 0xC2 || lead > 0xF4) return 0;
  const size_t max_length = lead >= 0xF0 ? 3 : lead >= 0xE0 ? 2 : 1;
  size_t length = 1;
  for (; length < max_length && position + length < bytes.size(); ++length) {
    const unsigned char next = byte(position + length);
    const bool second = length == 1;  // excludes overlong forms, surrogates and code points beyond U+10FFFF
    const unsigned char lowest = second && lead == 0xE0 ? 0xA0 : second && lead == 0xF0 ? 0x90 : 0x80;
    const unsigned char last = second && lead == 0xED ? 0x9F : second && lead == 0xF4 ? 0x8F : 0xBF;
    if (next < lowest || next > last) break;
  }
  return length;
}

// `show` appends the replacement of invalid bytes.
template <class F>
static std::string with_broken(std::string_view bytes, const F& show) {
  std::string out;
  out.reserve(bytes.size());
  while (!bytes.empty()) {
    const size_t valid = std::min(find_invalid_utf8(bytes), bytes.size());
    out += bytes.substr(0, valid);
    bytes.remove_prefix(valid);
    if (bytes.empty()) break;
    const size_t broken = std::max<size_t>(1, begun_character(bytes, 0));
    show(out, bytes.substr(0, broken));
    bytes.remove_prefix(broken);
  }
  return out;
}

std::string replace_broken(std::string_view bytes) {
  return with_broken(bytes, [](std::string& out, std::string_view) { append_utf8(out, 0xFFFD); });
}

std::string escape_broken(std::string_view bytes) {
  return with_broken(bytes, [](std::string& out, std::string_view broken) {
    for (const char c : broken) append_escaped(out, c);
  });
}

std::string quoted_text(std::string_view text) {
  std::string out = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') out += '\\';
    if (static_cast<unsigned char>(c) < 0x20 || c == 0x7f)
      out += fmt::format("\\u{:04X}", static_cast<unsigned char>(c));
    else
      out += c;
  }
  return out + "\"";
}

}  // namespace tessera
