// How the message of an error is made fit to be shown.
#include "tensor/error.h"

#include <string_view>

namespace tessera {
namespace {

constexpr size_t kLongest = 1000, kTail = 300;
constexpr std::string_view kCut = " [...] ";

bool inside_character(char c) { return (static_cast<unsigned char>(c) & 0xC0U) == 0x80U; }

// Both ends of a text that is too long, cut between characters of UTF-8.
std::string shortened(const std::string& text) {
  if (text.size() <= kLongest) return text;
  size_t head = kLongest - kTail - kCut.size(), tail = text.size() - kTail;
  while (head > 0 && inside_character(text[head])) --head;
  while (tail < text.size() && inside_character(text[tail])) ++tail;
  return text.substr(0, head).append(kCut).append(text, tail);
}

}  // namespace

std::string one_line(const std::string& message) {
  constexpr std::string_view digits = "0123456789abcdef";
  std::string line;
  for (size_t i = 0; i < message.size(); ++i) {
    auto byte = static_cast<unsigned char>(message[i]);
    const unsigned next = i + 1 < message.size() ? static_cast<unsigned char>(message[i + 1]) : 0U;
    const bool high = byte == 0xC2 && next >= 0x80 && next < 0xA0;  // U+0080 to U+009F
    if (high) byte = static_cast<unsigned char>(next);
    if (byte < 0x20 || byte == 0x7F || high)
      line.append("\\x").append({digits[byte >> 4U], digits[byte & 15U]});
    else
      line += message[i];
    i += high;
  }
  return shortened(line);
}

}  // namespace tessera
