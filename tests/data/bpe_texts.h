// Texts in many scripts for the tests of byte-level BPE: one for training, and one that training does not see.
#pragma once
#include <array>
#include <cstdint>
#include <iterator>
#include <map>
#include <string>
#include <vector>

#include "base/utf8.h"
#include "tensor/random.h"

namespace tessera::test {

inline std::string mixed_text() {
  std::string text;
  const char* const lines[] = {
      "It is a truth universally acknowledged, that a single man in possession of a good fortune must want a wife.\n",
      "She'd said they're sure we've won; I'll go, he isn't, you'd 've, 'tis, DON'T, O'Neil's dogs' bones.\n",
      "for (int i = 0; i < 1024; ++i) {\n\tsum += a[i] * b[i];  // fma\n}\n\n\n",
      "def f(x: float) -> float:\r\n    return x ** 2 + 3.14159e-10\r\n",
      "Οὐχὶ τῶν λόγων\n",
      "Все счастливые 12\n",
      "春眠不覺曉，處處聞\u3000啼鳥。\n",
      "सत\u094Dय १२ مرحبا\n",
      "😀👩\u200D🔬 🏳\uFE0F café cafe\u0301 naïve ½ Ⅳ x²\n",
      "a\u00A0b\u2003c\u2028d\u180Ee\u200Bf   g  \t h \013\014 i\302\205j   \n"};
  const Philox random = Philox::named(7, "mixed text");
  const char* const syllables[] = {"ra", "tes", "se", "lum", "qui", "ét", "mo", "x", "ing", "жи"};
  for (uint64_t i = 0; i < 3000; ++i) {
    text += lines[random.below(std::size(lines), i)];
    for (uint64_t n = random.below(6, i, 1); n > 0; --n)
      text += syllables[random.below(std::size(syllables), i, n + 1)];
  }
  return text;
}

// Words missing in the text above, and random characters from blocks of many scripts, digits, marks, spaces and
// symbols, all assigned long before the Unicode version of any library in use.
inline std::string unseen_text() {
  std::string text = mixed_text().substr(0, 5000) + " supercalifragilistic 20260101 ''s 's'll   \n\n  x";
  constexpr std::array<std::pair<char32_t, char32_t>, 20> kBlocks{
      {{0x09, 0x0D},     {0x20, 0x7E},     {0x80, 0x24F},    {0x300, 0x36F},   {0x391, 0x3A1},
       {0x400, 0x52F},   {0x5D0, 0x5EA},   {0x620, 0x669},   {0x905, 0x939},   {0x966, 0x96F},
       {0x1680, 0x1680}, {0x2000, 0x2064}, {0x20A0, 0x20B9}, {0x2100, 0x214F}, {0x2160, 0x2188},
       {0x2460, 0x249B}, {0x3000, 0x3096}, {0x4E00, 0x9FA5}, {0xAC00, 0xD7A3}, {0x1F300, 0x1F5FF}}};
  const Philox random = Philox::named(7, "unseen text");
  for (uint64_t i = 0; i < 20000; ++i) {
    const auto [first, last] = kBlocks[random.below(kBlocks.size(), i, 0)];
    const auto c = static_cast<char32_t>(first + random.below(last - first + 1, i, 1));
    for (uint64_t n = 1 + random.below(3, i, 2); n > 0; --n) append_utf8(text, c);
  }
  return text;
}

}  // namespace tessera::test
