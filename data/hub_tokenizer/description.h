// What a tokenizer.json says, checked: the file of the Python library `tokenizers`.
//
// Only BPE is read, and of its parts those that GPT-2, Llama, Mistral and Qwen have. Anything else that would change a
// token is refused by name; `truncation` and `padding` are not read, since here a text is never cut or filled up.
#pragma once
#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "data/bpe/merges.h"
#include "data/bpe/pieces.h"

namespace tessera::hub {

inline constexpr std::string_view kMark = "\xE2\x96\x81";  // U+2581, which stands for a space
// More than any known model has; a file beyond them would take minutes and gigabytes.
inline constexpr size_t kMostTokens = 600'000, kMostMerges = 600'000, kLongestAdded = 1000;

struct Hash {
  using is_transparent = void;
  size_t operator()(std::string_view s) const { return std::hash<std::string_view>()(s); }
};
using Ids = std::unordered_map<std::string, int32_t, Hash, std::equal_to<>>;

struct AddedToken {
  std::string content;
  int32_t token = 0;
  bool special = false, normalized = false;
};

enum class Prefix { never, first, always };        // of a mark before a text: only the first part, or every one
enum class Strip { none, space, marks_of_first };  // what decoding takes from the beginning of a text

struct Description {
  // The model.
  std::vector<std::string> tokens;  // the bytes that each adds to a text
  Ids vocab;                        // what merges work on: bytes where byte_level, else characters
  bpe::MergeTable merges;
  int32_t unknown = -1;  // for what has no token; -1: none
  bool fuse_unknown = false, byte_fallback = false, ignore_merges = false;
  bool marks_begin_words = false;    // no merge joins anything to a mark behind it
  std::vector<int32_t> byte_tokens;  // 256, with byte_level or byte_fallback; -1: none
  std::vector<AddedToken> added;
  // What becomes of a text before.
  bool nfc = false, prepend_mark = false;         // the normalizer's
  bool spaces_to_marks = false;                   // of either
  bool byte_level = false, prefix_space = false;  // the pre-tokenizer's, like all below
  Prefix prefix_mark = Prefix::never;
  bool cut_at_marks = false;
  std::vector<bpe::Pattern> cuts;  // each of what the one before has left
  // And after.
  std::vector<int32_t> before, behind;  // the tokens that mark the ends of a text
  Strip strip = Strip::none;
};

// Throws InputError that names `what` and the key, on anything malformed or unknown.
Description describe(const nlohmann::json& json, const std::string& what);

// Its parts, in this order: what is done to a text before and after, the model and the added tokens, and the tokens at
// the ends of a text.
void parse_steps(const nlohmann::json& json, const std::string& what, Description& d);
void parse_model(const nlohmann::json& json, const std::string& what, Description& d);
void parse_ends(const nlohmann::json& json, const std::string& what, Description& d);

}  // namespace tessera::hub
