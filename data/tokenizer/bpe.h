// Components of byte-pair encoding: the byte alphabet, splitting of a text into pieces (pre-tokenization), and merging
// of pairs within a piece.
//
// The alphabet of GPT-2's vocab.json and merges.txt maps each byte to one visible character: the 188 bytes that are
// visible in Latin-1 to themselves, the other 68, in order, to U+0100 and following. A space is "Ġ" (U+0120). Source:
// Radford et al. 2019 and the encoder published with it.
//
// A regular expression splits a text into pieces. Oniguruma runs the patterns, which come from untrusted files
// (split.cpp). GPT-2's pieces are endings of English contractions and runs of letters, of digits or of other visible
// characters, each with at most one leading space, and white space (except the last space before a word). Each maximal
// run of invalid UTF-8 is a separate piece. Source: Radford et al. 2019, section 2.2.
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
#include <type_traits>
#include <utility>
#include <vector>

namespace tessera::bpe {

// Sorted by the code points of their characters, which is the order of GPT-2's first 256 tokens.
const std::array<uint8_t, 256>& bytes_in_order();

std::string spell(std::string_view bytes);

// nullopt for a character outside the alphabet and for invalid UTF-8.
std::optional<std::string> unspell(std::string_view spelling);

inline constexpr std::string_view kGpt2 =
    R"('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+)";

// What becomes a piece, in this order: each match and the text between matches; only the text between; the text
// between, with each match joined to the preceding or following piece; as `isolated`, with adjacent matches joined.
enum class Behaviour { isolated, removed, merged_with_previous, merged_with_next, contiguous };

// Matching within one text, with a limit on total CPU time: 2 s plus 5 us per byte.
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

class Split {
 public:
  using Each = std::function<void(std::string_view)>;

  // Throws Error naming the unsupported construct.
  static Split from_regex(std::string_view regex, Behaviour behaviour = Behaviour::isolated, bool invert = false);
  static Split from_text(std::string_view text, Behaviour behaviour = Behaviour::isolated, bool invert = false);

  // Throws Error if matching exceeds its time limit. Cost with GPT-2's pattern: one pass, about 50 ns per byte.
  void pieces(std::string_view text, Matching& matching, const Each& f) const;
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

// Python's re.fullmatch(), for expressions with the same meaning in both dialects. Throws Error for an invalid
// expression and a match that exceeds the time limit.
bool fullmatch(std::string_view regex, std::string_view text);

// The pieces under GPT-2's pattern; their concatenation is the text, whatever its bytes.
void for_each_piece(std::string_view text, const Split::Each& f);

// Unicode word characters (Technical Standard 18, annex C), as `tokenizers` defines them outside of patterns.
inline constexpr std::string_view kLibraryWord = R"(\p{Alphabetic}\p{M}\p{Nd}\p{Pc}\u200C\u200D)";
bool is_word(char32_t c);

struct Merge {
  int32_t left, right;
};

// A key that sorts by (left, right).
inline uint64_t pair_key(int32_t left, int32_t right) {
  return static_cast<uint64_t>(static_cast<uint32_t>(left)) << 32 | static_cast<uint32_t>(right);
}

// Hash map from a text or pair key to a non-negative integer; with linear probing, most lookups access one slot.
template <class Key>
class Numbers {
 public:
  using Seen = std::conditional_t<std::is_same_v<Key, std::string>, std::string_view, Key>;

  void reserve(size_t keys) {
    if (keys + keys / 2 > slots_.size()) move_to(std::bit_ceil(keys + keys / 2));
  }
  // Returns false and adds nothing if the key exists.
  bool add(Seen key, int32_t number) {
    if (known_ + 1 + known_ / 2 >= slots_.size()) reserve(2 * known_ + 16);
    Slot& slot = slots_[find_slot(key)];
    if (slot.number >= 0) return false;
    slot = {Key(key), number};
    ++known_;
    return true;
  }
  // -1 if the key is missing.
  int32_t find(Seen key) const { return slots_.empty() ? -1 : slots_[find_slot(key)].number; }

 private:
  struct Slot {
    Key key{};
    int32_t number = -1;
  };

  size_t find_slot(Seen key) const {
    size_t at = std::hash<Seen>()(key) * 0x9E3779B97F4A7C15u;  // 2^64 / golden ratio: separates close keys
    for (at ^= at >> 32;; ++at)
      if (const Slot& slot = slots_[at & (slots_.size() - 1)]; slot.number < 0 || slot.key == key)
        return at & (slots_.size() - 1);
  }
  void move_to(size_t slots) {
    std::vector<Slot> old = std::exchange(slots_, std::vector<Slot>(slots));
    for (Slot& slot : old)
      if (slot.number >= 0) slots_[find_slot(slot.key)] = std::move(slot);
  }

  std::vector<Slot> slots_;  // a power of two; at most about two thirds occupied, so probing ends
  size_t known_ = 0;
};

class MergeTable {
 public:
  void reserve(size_t merges);
  // Adds the next merge by rank, and its result. Returns false and adds nothing if the pair exists.
  bool add(Merge merge, int32_t result);

  // Applies the merge of lowest rank, leftmost first, until none applies, and appends the tokens to `out`. Throws Error
  // for a piece of 2^30 or more tokens. Cost: n log n.
  void apply(std::span<const int32_t> piece, std::vector<int32_t>& out) const;

 private:
  std::vector<int32_t> results_;
  Numbers<uint64_t> ranks_;
};

}  // namespace tessera::bpe
