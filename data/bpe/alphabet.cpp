// The alphabet as two small tables.
#include "data/bpe/alphabet.h"

#include "data/utf8.h"

namespace tessera::bpe {
namespace {

constexpr int kLast = 0x100 + 67;  // the last code point of the alphabet

constexpr bool visible(int byte) {
  return (byte >= 0x21 && byte <= 0x7E) || (byte >= 0xA1 && byte <= 0xAC) || (byte >= 0xAE && byte <= 0xFF);
}

struct Tables {
  std::array<char32_t, 256> character{};
  std::array<int16_t, kLast + 1> byte{};  // -1: not in the alphabet
  std::array<uint8_t, 256> order{};
};

constexpr Tables make_tables() {
  Tables t;
  for (int16_t& b : t.byte) b = -1;
  size_t shown = 0, hidden = 188;
  for (int b = 0; b < 256; ++b) {
    const size_t place = visible(b) ? shown++ : hidden++;
    const char32_t c = visible(b) ? static_cast<char32_t>(b) : static_cast<char32_t>(0x100 + place - 188);
    t.order[place] = static_cast<uint8_t>(b);
    t.character[static_cast<size_t>(b)] = c;
    t.byte[c] = static_cast<int16_t>(b);
  }
  return t;
}
constexpr Tables kTables = make_tables();

}  // namespace

const std::array<uint8_t, 256>& bytes_in_order() { return kTables.order; }

std::string spell(std::string_view bytes) {
  std::string out;
  for (const char b : bytes) append_utf8(out, kTables.character[static_cast<uint8_t>(b)]);
  return out;
}

std::optional<std::string> unspell(std::string_view spelling) {
  std::string out;
  for (size_t position = 0; position < spelling.size();) {
    const std::optional<char32_t> c = next_code_point(spelling, position);
    if (!c || *c > kLast || kTables.byte[*c] < 0) return std::nullopt;
    out += static_cast<char>(kTables.byte[*c]);
  }
  return out;
}

}  // namespace tessera::bpe
