// How the message of an error is made fit to be shown.
#include "tensor/error.h"

#include <optional>
#include <string_view>

#include "tensor/code_point.h"

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
  std::string line;
  for (size_t i = 0; i < message.size();) {
    const size_t begin = i;
    const std::optional<char32_t> c = next_code_point(message, i);
    if (!c)
      append_escaped(line, message[i++]);
    else if (*c < 0x20 || (*c >= 0x7F && *c < 0xA0))
      append_escaped(line, static_cast<char>(*c));
    else
      line.append(message, begin, i - begin);
  }
  return shortened(line);
}

}  // namespace tessera
