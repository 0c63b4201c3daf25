// The parts of every byte-pair encoding: the alphabet that spells bytes, the cutting of a text into pieces, and the
// merging of pairs inside a piece.
//
// The alphabet of GPT-2's vocab.json and merges.txt makes each byte one visible character: 188 bytes that are visible
// in Latin-1 stand for themselves; the other 68, in order, are U+0100 and on, so that a space is written "Ġ" (U+0120)
// and a line break "Ċ" (U+010A). Source: Radford et al. 2019 and the encoder published with it.
//
// A pattern cuts a text into pieces, which are merged each alone. Patterns come from files of strangers and are run by
// Oniguruma (split.cpp). GPT-2's makes a piece of an English contraction's ending, or of one of: letters, numbers,
// other visible characters, each with at most one space before it, or white space (without the last space before a
// word). Bytes that are not UTF-8 are a piece of their own for each unbroken run of them. Source: Radford et al. 2019,
// "Language models are unsupervised multitask learners", section 2.2.
#pragma once
#include <array>
#include <bit>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace tessera::bpe {

// The 256 bytes in the order of their characters' code points, which is the order of GPT-2's first 256 tokens.
const std::array<uint8_t, 256>& bytes_in_order();

// The characters that spell some bytes, as UTF-8.
std::string spell(std::string_view bytes);

// The bytes that a spelling means; nothing when it holds a character outside the alphabet or is not UTF-8.
std::optional<std::string> unspell(std::string_view spelling);

inline constexpr std::string_view kGpt2 =
    R"('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+)";

// The fate of a match and of the text between matches: each a piece, matches gone, each match joined to the text
// before it or behind it, or matches side by side joined.
enum class Behaviour { isolated, removed, merged_with_previous, merged_with_next, contiguous };

// The needs of matching in one text, and the processor's time that all of it may take: 2 s and 5 us a byte.
class Matching {
 public:
  explicit Matching(size_t bytes);
  ~Matching();
  Matching(Matching&&) = delete;

 private:
  friend class Split;
  struct State;
  std::unique_ptr<State> state_;
};

// A pattern, as the library `tokenizers` has it: in Oniguruma's own syntax.
class Split {
 public:
  using Each = std::function<void(std::string_view)>;

  // Throws Error that says what in the pattern cannot be run.
  static Split of_regex(std::string_view regex, Behaviour behaviour = Behaviour::isolated, bool invert = false);
  static Split of_text(std::string_view text, Behaviour behaviour = Behaviour::isolated, bool invert = false);

  // Calls f(piece) for every piece of a text, in order. Throws Error where a match takes too long. Cost of GPT-2's: one
  // pass, about 50 ns a byte.
  void pieces(std::string_view text, Matching& matching, const Each& f) const;
  // The text with `by` for every match.
  std::string replaced(std::string_view text, Matching& matching, std::string_view by) const;

 private:
  struct Code;
  Split(std::string_view pattern, bool literal, Behaviour behaviour, bool invert);
  template <class F>
  void each(std::string_view text, Matching& matching, const F& f, size_t offset = 0) const;
  void valid_pieces(std::string_view text, Matching& matching, const Each& f) const;
  bool match(std::string_view text, size_t from, Matching& matching, size_t& begin, size_t& end) const;

  std::shared_ptr<const Code> code_;
  Behaviour behaviour_;
  bool invert_;
};

// Python's re.fullmatch(), as far as both kinds of expressions are the same. Throws Error for none, and for one that
// takes too long.
bool fullmatch(std::string_view regex, std::string_view text);

// The pieces of a text by GPT-2's pattern; together they are the text, whatever its bytes.
void for_each_piece(std::string_view text, const Split::Each& f);

// The characters of words by Unicode (Technical Standard 18, annex C), as the library has them outside of patterns.
inline constexpr std::string_view kLibraryWord = R"(\p{Alphabetic}\p{M}\p{Nd}\p{Pc}\u200C\u200D)";
// Whether a character is one of them.
bool is_word(char32_t c);

struct Merge {
  int32_t left, right;
};

// Two tokens side by side as one number, in the order of (left, right).
inline uint64_t pair_key(int32_t left, int32_t right) {
  return static_cast<uint64_t>(static_cast<uint32_t>(left)) << 32 | static_cast<uint32_t>(right);
}

// Numbers from 0 by key: a text, or a pair's number. A key lies where its hash says, or at the next free place behind,
// so that most searches look at one place of memory.
template <class Key>
class Numbers {
 public:
  using Seen = std::conditional_t<std::is_same_v<Key, std::string>, std::string_view, Key>;

  void reserve(size_t keys) {
    if (keys + keys / 2 > slots_.size()) move_to(std::bit_ceil(keys + keys / 2));
  }
  // Returns false, and adds nothing, for a key that is known.
  bool add(Seen key, int32_t number) {
    if (known_ + 1 + known_ / 2 >= slots_.size()) reserve(2 * known_ + 16);
    Slot& slot = slots_[find_slot(key)];
    if (slot.number >= 0) return false;
    slot = {Key(key), number};
    ++known_;
    return true;
  }
  // The number of a key; -1: none.
  int32_t find(Seen key) const { return slots_.empty() ? -1 : slots_[find_slot(key)].number; }

 private:
  struct Slot {
    Key key{};
    int32_t number = -1;
  };

  size_t find_slot(Seen key) const {
    size_t at = std::hash<Seen>()(key) * 0x9E3779B97F4A7C15u;  // 2^64 by the golden ratio: near keys come apart
    for (at ^= at >> 32;; ++at)
      if (const Slot& slot = slots_[at & (slots_.size() - 1)]; slot.number < 0 || slot.key == key)
        return at & (slots_.size() - 1);
  }
  void move_to(size_t slots) {
    std::vector<Slot> old = std::exchange(slots_, std::vector<Slot>(slots));
    for (Slot& slot : old)
      if (slot.number >= 0) slots_[find_slot(slot.key)] = std::move(slot);
  }

  std::vector<Slot> slots_;  // a power of two, some two thirds taken at most: one is free
  size_t known_ = 0;
};

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
  std::vector<int32_t> results_;  // the result of each merge
  Numbers<uint64_t> ranks_;       // by the pair
};

}  // namespace tessera::bpe
