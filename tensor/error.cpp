// How the message of an error is made fit to be shown.
#include "tensor/error.h"

#include <string_view>

namespace tessera {
namespace {

constexpr size_t kLongest = 8000, kTail = 2000;
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
  for (const char c : message) {
    const auto byte = static_cast<unsigned char>(c);
    if (byte < 0x20 || byte == 0x7F)
      line.append("\\x").append({digits[byte >> 4U], digits[byte & 15U]});
    else
      line += c;
  }
  return shortened(line);
}

}  // namespace tessera
