// Texts in many scripts for the tests of byte-level BPE: one to learn from, one that was not seen.
#pragma once
#include <iterator>

#include "data/utf8.h"
#include "tensor/random.h"

namespace tessera::test {

inline std::string mixed_text() {
  std::string text;
  const char* const lines[] = {
      "It is a truth universally acknowledged, that a single man in possession of a good fortune must want a wife.\n",
      "She'd said they're sure we've won; I'll go, he isn't, you'd 've, 'tis, DON'T, O'Neil's dogs' bones.\n",
      "for (int i = 0; i < 1024; ++i) {\n\tsum += a[i] * b[i];  // fma\n}\n\n\n",
      "def f(x: float) -> float:\r\n    return x ** 2 + 3.14159e-10\r\n",
      "\xCE\x9F\xE1\xBD\x90\xCF\x87\xE1\xBD\xB6 \xCF\x84\xE1\xBF\xB6\xCE\xBD "
      "\xCE\xBB\xCF\x8C\xCE\xB3\xCF\x89\xCE\xBD\n",
      "\xD0\x92\xD1\x81\xD0\xB5 \xD1\x81\xD1\x87\xD0\xB0\xD1\x81\xD1\x82\xD0\xBB\xD0\xB8\xD0\xB2\xD1\x8B\xD0\xB5 12\n",
      "\xE6\x98\xA5\xE7\x9C\xA0\xE4\xB8\x8D\xE8\xA6\xBA\xE6\x9B\x89\xEF\xBC\x8C\xE8\x99\x95\xE8\x99\x95\xE8\x81\x9E"
      "\xE3\x80\x80\xE5\x95\xBC\xE9\xB3\xA5\xE3\x80\x82\n",
      "\xE0\xA4\xB8\xE0\xA4\xA4\xE0\xA5\x8D\xE0\xA4\xAF \xE0\xA5\xA7\xE0\xA5\xA8 "
      "\xD9\x85\xD8\xB1\xD8\xAD\xD8\xA8\xD8\xA7\n",
      "\xF0\x9F\x98\x80\xF0\x9F\x91\xA9\xE2\x80\x8D\xF0\x9F\x94\xAC \xF0\x9F\x8F\xB3\xEF\xB8\x8F "
      "caf\xC3\xA9 cafe\xCC\x81 na\xC3\xAFve \xC2\xBD \xE2\x85\xA3 x\xC2\xB2\n",
      "a\xC2\xA0"
      "b\xE2\x80\x83"
      "c\xE2\x80\xA8"
      "d\xE1\xA0\x8E"
      "e\xE2\x80\x8B"
      "f   g  \t h \x0B\x0C i\xC2\x85j   \n"};
  const Philox random = Philox::named(7, "mixed text");
  const char* const syllables[] = {"ra", "tes", "se", "lum", "qui", "\xC3\xA9t", "mo", "x", "ing", "\xD0\xB6\xD0\xB8"};
  for (uint64_t i = 0; i < 3000; ++i) {
    text += lines[random.below(std::size(lines), i)];
    for (uint64_t n = random.below(6, i, 1); n > 0; --n)
      text += syllables[random.below(std::size(syllables), i, n + 1)];
  }
  return text;
}

// Words that the text above does not have, and characters drawn from blocks of many scripts, digits, marks, spaces and
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
