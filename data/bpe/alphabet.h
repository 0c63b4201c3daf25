// The printable alphabet in which GPT-2's vocab.json and merges.txt spell bytes: each byte is one visible character.
//
// 188 bytes that are visible in Latin-1 stand for themselves; the other 68, in order, are U+0100 and on, so that a
// space is written "Ġ" (U+0120) and a line break "Ċ" (U+010A). Source: Radford et al. 2019 and the encoder published
// with it.
#pragma once
#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace tessera::bpe {

// The 256 bytes in the order of their characters' code points, which is the order of GPT-2's first 256 tokens.
const std::array<uint8_t, 256>& bytes_in_order();

// The characters that spell some bytes, as UTF-8.
std::string spell(std::string_view bytes);

// The bytes that a spelling means; nothing when it holds a character outside the alphabet or is not UTF-8.
std::optional<std::string> unspell(std::string_view spelling);

}  // namespace tessera::bpe
