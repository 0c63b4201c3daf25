// A tokenizer as a description of what becomes of a text: the parts of a tokenizer.json of the library `tokenizers`,
// which serve byte-level BPE with any pattern, BPE over characters with bytes to fall back on, as Llama 2 and Mistral
// have it, and our own tokenizers.
#pragma once
#include <nlohmann/json_fwd.hpp>
#include <unordered_map>

#include "data/tokenizer.h"
#include "data/tokenizer/bpe.h"

namespace tessera {
namespace hub {

inline constexpr std::string_view kMark = "\xE2\x96\x81";  // U+2581, which stands for a space

struct Hash {
  using is_transparent = void;
  size_t operator()(std::string_view s) const { return std::hash<std::string_view>()(s); }
};
using Ids = bpe::Numbers<std::string>;

struct AddedToken {
  int32_t token = -1;
  bool special = false, normalized = false;
  bool single_word = false, left = false, right = false;  // alone between words; takes the spaces before it, behind it
};

// A change that a normalizer makes.
struct Change {
  enum class Kind { nfc, nfd, nfkc, nfkd, lowercase, strip_accents, strip_left, strip_right, prepend, replace } kind;
  std::string text = {};  // put before, or for what `from` matches
  std::optional<bpe::Split> from = {};
};

enum class Prefix { never, first, always };        // parts that get a mark before them: only the first, or every one
enum class Strip { none, space, marks_of_first };  // characters that decoding takes from the beginning of a text

struct Description {
  // The model.
  std::vector<std::string> tokens;  // the bytes that each adds to a text
  Ids vocab;                        // by the spelling in the file; of our own BPE by the bytes
  bpe::MergeTable merges;
  int32_t unknown = -1;  // for what has no token; -1: none
  bool fuse_unknown = false, byte_fallback = false, ignore_merges = false;
  bool marks_begin_words = false;    // no merge joins anything to a mark behind it
  std::vector<int32_t> byte_tokens;  // 256, with byte_level or byte_fallback; -1: none
  std::vector<std::pair<std::string, AddedToken>> added;
  // The changes of a text before it is merged.
  bool any_bytes = false;                         // a text need not be UTF-8; else what is not becomes U+FFFD
  std::vector<Change> changes;                    // the normalizer's, in order
  bool byte_level = false, prefix_space = false;  // the pre-tokenizer's, like all below
  Prefix prefix_mark = Prefix::never;
  bool marks_spaces = false;     // Metaspace, which runs behind the search for added tokens
  std::vector<bpe::Split> cuts;  // each of what the one before has left
  // The changes of tokens and of a decoded text.
  bool marks_are_spaces = false, spaces_between = false;  // in a decoded text; the second: every token but the first
  std::vector<int32_t> before, behind;                    // the tokens that mark the ends of a text
  Strip strip = Strip::none;
};

// A tokenizer.json, parsed, with the members of its vocabulary aside.
struct File;

// The description in a tokenizer.json. Only BPE is read, with most of the other parts that the library
// has (docs/data.md). Anything else that would change a token is refused by name; `truncation` and `padding` are not
// read, since here a text is never cut or filled up. Throws InputError that names `what` and the key, on anything
// malformed or unknown.
Description describe(const File& file, const std::string& what);

// Tokens that are found in a text as they are written, before anything is cut or merged.
class AddedTokens {
 public:
  void add(std::string_view content, const AddedToken& token);

  // Calls f(part, -1) for the text between the tokens that stand in `text`, where there is any, and f(part, token) for
  // each of these: the leftmost, and of those that begin at one place the longest. Special ones stay text unless
  // `special`, and so do those that want a word's place and have none. Cost: the text's length, times the longest token
  // where one begins.
  void split(std::string_view text, bool special, const std::function<void(std::string_view, int32_t)>& f) const;
  // Adds how often each special one occurs in a text.
  void count_special(std::string_view text, std::map<std::string, int64_t>& counts) const;

 private:
  // The longest token at the beginning of the text, or the end.
  std::map<std::string, AddedToken, std::less<>>::const_iterator longest(std::string_view text) const;

  std::map<std::string, AddedToken, std::less<>> tokens_;
  std::array<bool, 256> begins_{};  // whether one begins with the byte
};

}  // namespace hub

class DescribedTokenizer : public Tokenizer {
 public:
  int64_t vocab_size() const override { return std::ssize(d_.tokens); }
  // Cost: the pieces, and n log n in the bytes of a piece that was not met before; memory grows with the new pieces.
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
  // `what` names the file of the added tokens in messages.
  DescribedTokenizer(std::string_view kind, hub::Description d, const std::string& what = "");

  const std::string& to_string(int32_t token) const;

  hub::Description d_;

 private:
  std::string_view normalized(std::string_view part, bool prefixed, bpe::Matching& matching, std::string& room) const;
  void encode_part(std::string_view part, bool first, bool prefixed, bpe::Matching& matching,
                   std::vector<int32_t>& out) const;
  void cut(std::string_view text, size_t step, bpe::Matching& matching, const bpe::Split::Each& f) const;
  void encode_piece(std::string_view piece, std::vector<int32_t>& symbols, std::vector<int32_t>& out) const;
  void split_symbols(std::string_view piece, std::vector<int32_t>& symbols) const;

  hub::AddedTokens written_, normal_;  // those that stand in a text as it is, and in the normalised one
  hub::Ids names_;                     // the added tokens by name
};

// One token per byte; takes any input.
class ByteTokenizer final : public DescribedTokenizer {
 public:
  ByteTokenizer();
  std::vector<int32_t> encode_with(std::string_view text, const EncodeOptions&) const override;
  std::map<std::string, std::string> files() const override;
  std::string to_json() const override;
};

// One token per Unicode character of a given set.
class CharTokenizer final : public DescribedTokenizer {
 public:
  // The characters of `text`. Throws InputError (naming `what` and the byte offset) when it is not UTF-8, or empty.
  static CharTokenizer of_text(std::string_view text, const std::string& what);
  // Reads a text that `walk` hands on in chunks of whole characters.
  using ChunkWalk = std::function<void(const std::function<void(std::string_view chunk)>& f)>;
  static CharTokenizer of_chunks(const ChunkWalk& walk, const std::string& what);
  // The file's "characters", code points that ascend. Throws InputError.
  static CharTokenizer from_json(const nlohmann::json& json, const std::string& what);

  std::vector<int32_t> encode_with(std::string_view text, const EncodeOptions&) const override;
  std::map<std::string, std::string> files() const override;
  std::string to_json() const override;

 private:
  explicit CharTokenizer(std::vector<char32_t> characters);

  std::vector<char32_t> characters_;
  std::unordered_map<char32_t, int32_t> index_;
};

// Byte-level byte-pair encoding, as GPT-2 has it: every byte is a token, and each merge joins two tokens into a longer
// one. Within a piece of text (bpe.h) the merge of lowest rank is applied again and again until none applies.
//
// Any bytes can be encoded, and decoding gives them back exactly. Source: Sennrich et al. 2016, "Neural machine
// translation of rare words with subword units", section 3.2; on bytes: Radford et al. 2019, section 2.2.
class BpeTokenizer final : public DescribedTokenizer {
 public:
  using Merge = bpe::Merge;

  // The bytes of each token, and the merges in order of rank. A token that is neither one byte nor the result of a
  // merge is special, like <|endoftext|>: encode() never makes it, decode() writes it out. Throws InputError, naming
  // `what`: a byte without a token, a token given twice, a merge given twice or of or into a token that is not there.
  BpeTokenizer(std::vector<std::string> tokens, std::vector<Merge> merges, const std::string& what);

  // Reads vocab.json and merges.txt of a folder, as GPT-2's are. Throws InputError naming file, line and key.
  static BpeTokenizer load_files(const std::filesystem::path& folder);
  // The contents of those two files.
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

// How often each piece of GPT-2's pattern stands in a text. Where there are more than a million different ones, the
// rarest are forgotten, until half of them are left. Cost: one pass; a million pieces take 100 MB.
class WordCounts {
 public:
  static constexpr size_t kMax = 1'000'000;
  using Counts = std::unordered_map<std::string, int64_t, hub::Hash, std::equal_to<>>;

  void add(std::string_view text);
  const Counts& all() const { return counts_; }
  // The largest count with which a piece was forgotten; 0: none was.
  int64_t forgotten() const { return forgotten_; }

 private:
  Counts counts_;
  int64_t forgotten_ = 0;
};

struct BpeTraining {
  int64_t vocab_size = 50257;  // GPT-2's; at least 256
  int64_t least_count = 2;     // count of a pair that is worth a token: a small text ends with fewer than vocab_size
  // Called now and then with the tokens made so far.
  std::function<void(int64_t made)> progress = nullptr;
};

// Begins with the 256 bytes, and again and again joins the pair of tokens that stands side by side most often in the
// pieces of the text (the pair with the smaller numbers among equals) until the vocabulary is full or no pair is
// frequent enough. Source: Sennrich et al. 2016, algorithm 1. Cost: each merge costs only the distinct pieces that
// contain it.
BpeTokenizer train_bpe(WordCounts pieces, const BpeTraining& options);
BpeTokenizer train_bpe(std::string_view text, const BpeTraining& options);

// A tokenizer that others made: the tokenizer.json of a Hugging Face folder and the files that belong to it. Token for
// token what the Python library `tokenizers` makes of a text; like there, what is not UTF-8 counts as U+FFFD. Special
// tokens' names in a text are text unless asked otherwise (the library's encode_special_tokens).
class HubTokenizer final : public DescribedTokenizer {
 public:
  using Files = std::map<std::string, std::string>;

  // Reads the files, their contents by name: tokenizer.json, and where they are there tokenizer_config.json,
  // special_tokens_map.json, chat_template.jinja and generation_config.json. Throws InputError naming the file.
  HubTokenizer(Files files, const std::string& what);
  HubTokenizer(Files&& files, const hub::File& file, const std::string& what);  // `file` is the first of them, parsed
  // Reads a folder with this tokenizer.json, or without one with vocab.json and merges.txt, and the tokens that its
  // other files name (folder.cpp); nothing for a file of ours, and for a GPT-2 that has no other file. Ids that its
  // generation_config.json does not name are those of its config.json, as in transformers.
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
  // One that is not `needed` may be no token here.
  std::optional<int32_t> named(const nlohmann::json& config, const char* key, const std::string& what,
                               bool needed = true) const;

  Files files_, names_;
  std::string chat_template_;
  std::optional<int32_t> pad_;
};

namespace hub {

// The keys of the named tokens, in transformers' order.
inline constexpr std::array<std::string_view, 7> kTokenKeys{"bos_token", "eos_token", "unk_token", "sep_token",
                                                            "pad_token", "cls_token", "mask_token"};
// tokenizer_config.json with the keys of special_tokens_map.json (folder.cpp).
nlohmann::json joined_settings(const HubTokenizer::Files& files, const std::string& what);

}  // namespace hub

// A special token in the list of a tokenizer.json.
nlohmann::json special_token(const nlohmann::json& id, const std::string& content);

// A file of a tokenizer, which is refused where it is larger than any tokenizer's.
std::string read_tokenizer_file(const std::filesystem::path& file);

}  // namespace tessera
