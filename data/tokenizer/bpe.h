// The parts of every byte-pair encoding: the alphabet that spells bytes, the cutting of a text into pieces, and the
// merging of pairs inside a piece.
//
// The alphabet of GPT-2's vocab.json and merges.txt makes each byte one visible character: 188 bytes that are visible
// in Latin-1 stand for themselves; the other 68, in order, are U+0100 and on, so that a space is written "Ġ" (U+0120)
// and a line break "Ċ" (U+010A). Source: Radford et al. 2019 and the encoder published with it.
//
// GPT-2's pattern makes a piece of an English contraction's ending ('s 't 're 've 'm 'll 'd), or of one of: letters,
// numbers, other visible characters, each with at most one space before it, or white space (without the last space
// before a word). Letters and numbers are Unicode's classes L and N; white space is Unicode's property, spelled out,
// since PCRE2's \s counts U+180E too. Bytes that are not UTF-8 are a piece of their own for each unbroken run of them.
// Source: Radford et al. 2019, "Language models are unsupervised multitask learners", section 2.2; the other patterns
// are those of the tokenizer.json of Llama 3 and Qwen 2, and what the library `tokenizers` calls Digits.
#pragma once
#include <array>
#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

namespace tessera::bpe {

// The 256 bytes in the order of their characters' code points, which is the order of GPT-2's first 256 tokens.
const std::array<uint8_t, 256>& bytes_in_order();

// The characters that spell some bytes, as UTF-8.
std::string spell(std::string_view bytes);

// The bytes that a spelling means; nothing when it holds a character outside the alphabet or is not UTF-8.
std::optional<std::string> unspell(std::string_view spelling);

enum class Pattern { gpt2, llama3, qwen, each_digit, digits };

// The pattern that a tokenizer.json writes so; nothing for any other. A pattern from a file is never run, only
// recognised: so none can backtrack for ever.
std::optional<Pattern> pattern_written(std::string_view regex);

// Calls f(piece) for every piece of a text, in order; together they are the text, whatever its bytes. Cost: one pass,
// about 10 ns a byte.
void for_each_piece(std::string_view text, const std::function<void(std::string_view)>& f,
                    Pattern pattern = Pattern::gpt2);

struct Merge {
  int32_t left, right;
};

// Two tokens side by side as one number, in the order of (left, right).
inline uint64_t pair_key(int32_t left, int32_t right) {
  return static_cast<uint64_t>(static_cast<uint32_t>(left)) << 32 | static_cast<uint32_t>(right);
}

// Pairs of tokens that become one, in order of rank.
class MergeTable {
 public:
  void reserve(size_t merges);
  // The next merge in order of rank, and the token that it makes. False, and nothing is added, for a pair that is
  // known.
  bool add(Merge merge, int32_t result);

  // Appends to `out` what becomes of the tokens of a piece when the merge of lowest rank is applied again and again,
  // the leftmost first, until none applies. Throws Error for a piece of 2^30 tokens. Cost: n log n.
  void apply(std::span<const int32_t> piece, std::vector<int32_t>& out) const;

 private:
  std::vector<int32_t> results_;                 // the result of each merge
  std::unordered_map<uint64_t, int32_t> ranks_;  // by the pair
};

}  // namespace tessera::bpe
