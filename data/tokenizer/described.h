// Tokenizers described by the components of the `tokenizers` library's tokenizer.json: byte-level BPE with any pattern,
// BPE over characters with byte fallback (Llama 2, Mistral), and Tessera's own.
#pragma once
#include <array>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "data/tokenizer.h"
#include "data/tokenizer/bpe.h"

namespace tessera {
namespace hub {

inline constexpr std::string_view kMark = "\xE2\x96\x81";  // U+2581 replaces a space

struct Hash {
  using is_transparent = void;
  size_t operator()(std::string_view s) const { return std::hash<std::string_view>()(s); }
};
using Ids = bpe::Numbers<std::string>;

struct AddedToken {
  int32_t token = -1;
  bool special = false, normalized = false;
  bool single_word = false, left = false, right = false;  // requires word boundaries; absorbs spaces at either end
};

struct Change {
  enum class Kind { nfc, nfd, nfkc, nfkd, lowercase, strip_accents, strip_left, strip_right, prepend, replace } kind;
  std::string text = {};  // prepended, or replaces matches of `from`
  std::optional<bpe::Split> from = {};
};

enum class Prefix { never, first, always };        // segments that get a leading mark
enum class Strip { none, space, marks_of_first };  // stripped from the start of decoded text

struct Description {
  std::vector<std::string> tokens;  // bytes that each token appends
  Ids vocab;                        // by spelling in the file; for Tessera's BPE by bytes
  bpe::MergeTable merges;
  int32_t unknown = -1;  // for text without a token; -1: none
  bool fuse_unknown = false, byte_fallback = false, ignore_merges = false;
  bool marks_begin_words = false;    // no merge contains a mark except at its beginning
  std::vector<int32_t> byte_tokens;  // 256 entries with byte_level or byte_fallback; -1: none
  std::vector<std::pair<std::string, AddedToken>> added;
  bool any_bytes = false;                         // accepts invalid UTF-8; otherwise invalid bytes become U+FFFD
  std::vector<Change> changes;                    // normalizer steps, in order
  bool byte_level = false, prefix_space = false;  // of the pre-tokenizer, like the following members
  Prefix prefix_mark = Prefix::never;
  bool marks_spaces = false;     // Metaspace, after the search for added tokens
  std::vector<bpe::Split> cuts;  // each splits the pieces of the previous one
  bool marks_are_spaces = false, spaces_between = false;
  std::vector<int32_t> before, after;  // added at the beginning and the end of a text
  Strip strip = Strip::none;
};

struct File;

// The model must be BPE; docs/data.md lists the supported components. `truncation` and `padding` are ignored, because
// texts are never truncated or padded. Throws InputError naming the key for malformed input, and for unsupported
// settings that would change a token.
Description describe(const File& file, const std::string& what);

// Matched literally, before splitting and merging.
class AddedTokens {
 public:
  void add(std::string_view content, const AddedToken& token);

  // Calls f(segment, token), with token -1 for the non-empty text between added tokens. The leftmost match wins, then
  // the longest. Special tokens remain text unless `special` is set, as do single_word tokens without word boundaries.
  // Cost: the text's length, times the longest token's length where a token may begin.
  void split(std::string_view text, bool special, const std::function<void(std::string_view, int32_t)>& f) const;
  void count_special(std::string_view text, std::map<std::string, int64_t>& counts) const;

 private:
  // The longest token at the start of the text, or the end iterator.
  std::map<std::string, AddedToken, std::less<>>::const_iterator longest(std::string_view text) const;

  std::map<std::string, AddedToken, std::less<>> tokens_;
  std::array<bool, 256> begins_{};  // bytes that begin a token
};

}  // namespace hub

class DescribedTokenizer : public Tokenizer {
 public:
  int64_t vocab_size() const override { return std::ssize(d_.tokens); }
  // Cost: splitting, and n log n in the bytes of each piece.
  std::vector<int32_t> encode_with(std::string_view text, const EncodeOptions& options) const override;
  std::string decode(std::span<const int32_t> tokens) const override;
  std::string token_bytes(int32_t token) const override { return to_string(token); }
  std::span<const int32_t> beginning() const override { return d_.before; }
  std::optional<int32_t> special(std::string_view name) const override;
  std::pair<bool, bool> strips(int32_t token) const override;
  void count_special(std::string_view text, std::map<std::string, int64_t>& counts) const override {
    written_.count_special(text, counts);
  }

 protected:
  DescribedTokenizer(std::string_view kind, hub::Description d, const std::string& what = "");

  const std::string& to_string(int32_t token) const;

  hub::Description d_;

 private:
  std::string_view normalized(std::string_view text, bool prefixed, bpe::Matching& matching, std::string& buffer) const;
  void encode_text(std::string_view text, bool first, bool prefixed, bpe::Matching& matching,
                   std::vector<int32_t>& out) const;
  void cut(std::string_view text, size_t step, bpe::Matching& matching, const bpe::Split::Each& f) const;
  void encode_piece(std::string_view piece, std::vector<int32_t>& symbols, std::vector<int32_t>& out) const;
  void split_symbols(std::string_view piece, std::vector<int32_t>& symbols) const;

  hub::AddedTokens written_, normal_;  // matched in raw and in normalized text
  hub::Ids names_;                     // added tokens by name
};

class ByteTokenizer final : public DescribedTokenizer {
 public:
  ByteTokenizer();
  std::vector<int32_t> encode_with(std::string_view text, const EncodeOptions&) const override;
  std::map<std::string, std::string> files() const override;
  std::string to_json() const override;
};

class CharTokenizer final : public DescribedTokenizer {
 public:
  // Throws InputError (with the byte offset) if the text is empty or not UTF-8.
  static CharTokenizer from_text(std::string_view text, const std::string& what);
  // `walk` passes chunks of complete characters.
  using ChunkWalk = std::function<void(const std::function<void(std::string_view chunk)>& f)>;
  static CharTokenizer from_chunks(const ChunkWalk& walk, const std::string& what);
  // Reads "characters", ascending code points. Throws InputError.
  static CharTokenizer from_json(const nlohmann::json& json, const std::string& what);

  std::vector<int32_t> encode_with(std::string_view text, const EncodeOptions&) const override;
  std::map<std::string, std::string> files() const override;
  std::string to_json() const override;

 private:
  explicit CharTokenizer(std::vector<char32_t> characters);

  std::vector<char32_t> characters_;
  std::unordered_map<char32_t, int32_t> index_;
};

// Byte-level BPE, as in GPT-2: any byte sequence can be encoded and decodes to itself. Source: Sennrich et al. 2016,
// "Neural machine translation of rare words with subword units", section 3.2; on bytes: Radford et al. 2019, section
// 2.2.
class BpeTokenizer final : public DescribedTokenizer {
 public:
  using Merge = bpe::Merge;

  // Merges are in order of rank. A token that is neither one byte nor the result of a merge is special, like
  // <|endoftext|>: encode() never produces it, decode() prints it. Throws InputError for a byte without a token,
  // duplicates, and a merge whose operands or result are not tokens.
  BpeTokenizer(std::vector<std::string> tokens, std::vector<Merge> merges, const std::string& what);

  // GPT-2's vocab.json and merges.txt. Throws InputError naming file, line and key.
  static BpeTokenizer load_files(const std::filesystem::path& folder);
  static BpeTokenizer parse_files(std::string_view vocab_json, std::string_view merges_txt, const std::string& vocab,
                                  const std::string& merges);
  std::string vocab_json() const;
  std::string merges_txt() const;
  std::map<std::string, std::string> files() const override;
  std::string to_json() const override;

  const std::vector<std::string>& tokens() const { return d_.tokens; }
  const std::vector<Merge>& merges() const { return merges_; }

 private:
  std::vector<Merge> merges_;
};

// Frequencies of pieces under GPT-2's pattern. Above a million distinct pieces, the rarest half is dropped. Cost: one
// pass; 100 MB per million pieces.
class WordCounts {
 public:
  static constexpr size_t kMax = 1'000'000;
  using Counts = std::unordered_map<std::string, int64_t, hub::Hash, std::equal_to<>>;

  void add(std::string_view text);
  const Counts& all() const { return counts_; }
  // The largest count of a dropped piece, or 0.
  int64_t forgotten() const { return forgotten_; }

 private:
  Counts counts_;
  int64_t forgotten_ = 0;
};

struct BpeTraining {
  int64_t vocab_size = 50257;  // GPT-2's; at least 256
  int64_t min_count = 2;       // of a pair; a small text may yield fewer than vocab_size tokens
  std::function<void(int64_t made)> progress = nullptr;
};

// Starts with the 256 bytes and merges the most frequent adjacent pair within pieces (on ties, the smaller ids) until
// the vocabulary is full or no pair is frequent enough. Source: Sennrich et al. 2016, algorithm 1. Cost: each merge
// visits only the distinct pieces that contain it.
BpeTokenizer train_bpe(WordCounts pieces, const BpeTraining& options);
BpeTokenizer train_bpe(std::string_view text, const BpeTraining& options);

// A Hugging Face tokenizer. Tokens equal those of the Python library `tokenizers`, in which invalid UTF-8 also counts
// as U+FFFD. Names of special tokens in a text are text unless requested otherwise.
class HubTokenizer final : public DescribedTokenizer {
 public:
  using Files = std::map<std::string, std::string>;

  // Contents by file name: tokenizer.json and, if present, tokenizer_config.json, special_tokens_map.json,
  // chat_template.jinja and generation_config.json. Throws InputError naming the file.
  HubTokenizer(Files files, const std::string& what);
  HubTokenizer(Files&& files, const hub::File& file, const std::string& what);  // `file`: parsed tokenizer.json
  // `text` is the directory's tokenizer.json; without it, vocab.json and merges.txt are read. Other files add tokens
  // (folder.cpp). Null for Tessera's own files, and for GPT-2's two files alone. Token ids missing from
  // generation_config.json come from config.json, as in transformers.
  static std::unique_ptr<HubTokenizer> load(const std::filesystem::path& folder,
                                            const std::optional<std::string>& text);
  static bool is_file(std::string_view name);  // one of the five above

  std::map<std::string, std::string> named_tokens() const override { return names_; }
  std::string_view chat_template() const override { return chat_template_; }
  std::string generation_config() const override;
  std::map<std::string, std::string> files() const override;
  std::string to_json() const override;

 private:
  void read_config(const std::string& what);
  // If not `needed`, the name may denote no token.
  std::optional<int32_t> named(const nlohmann::json& config, const char* key, const std::string& what,
                               bool needed = true) const;

  Files files_, names_;
  std::string chat_template_;
  std::optional<int32_t> pad_;
};

namespace hub {

// In transformers' order.
inline constexpr std::array<std::string_view, 7> kTokenKeys{"bos_token", "eos_token", "unk_token", "sep_token",
                                                            "pad_token", "cls_token", "mask_token"};
// tokenizer_config.json merged with special_tokens_map.json.
nlohmann::json joined_settings(const HubTokenizer::Files& files, const std::string& what);

}  // namespace hub

// An entry of "added_tokens".
nlohmann::json special_token(const nlohmann::json& id, const std::string& content);

// Throws InputError if the file is larger than any valid one.
std::string read_tokenizer_file(const std::filesystem::path& file);

}  // namespace tessera
