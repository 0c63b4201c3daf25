// Tokenizers: text to integer tokens and back.
//
// `char` numbers the Unicode characters that occur in the training text, in order of code point; `bytes` is the 256
// byte values; `bpe` (data/bpe/) joins bytes into frequent words; `hub` (data/hub_tokenizer/) is one that others made
// and saved as a Hugging Face tokenizer.json. A tokenizer travels as one JSON file beside the tokens or the checkpoint
// that it belongs to.
#pragma once
#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

namespace tessera {

inline constexpr std::string_view kTokenizerFormat = "tessera tokenizer";

struct EncodeOptions {
  bool special_in_text = false;  // special tokens whose names stand in the text are meant; otherwise they are text
  bool add_ends = false;         // what the tokenizer puts before a text and after it: bos, eos, or nothing
  bool begins = true;            // false: the text goes on behind other tokens, so that nothing marks its beginning
};

class Tokenizer {
 public:
  virtual ~Tokenizer() = default;

  virtual int64_t vocab_size() const = 0;
  // The tokens of a text, each in [0, vocab_size()). Throws Error (usage) naming what cannot be encoded, and where.
  virtual std::vector<int32_t> encode(std::string_view text) const = 0;
  // The same with what the options ask for. encode(text) is this with none of them.
  virtual std::vector<int32_t> encode_with(std::string_view text, const EncodeOptions&) const { return encode(text); }
  // The text of some tokens, special ones by their names. Bytes that are no whole character stay as they are: to show
  // a text while it grows, see StreamDecoder. Throws Error (usage) for a token outside the vocabulary.
  virtual std::string decode(std::span<const int32_t> tokens) const = 0;
  // The bytes that a token adds to a text that has begun. (The first word of a text may lose its space in decode().)
  virtual std::string bytes_of(int32_t token) const { return decode(std::span(&token, 1)); }
  // The token that begins a text (bos), where there is one.
  virtual std::optional<int32_t> bos() const { return {}; }
  // The token that ends a text and stands between documents: eos, <|endoftext|>; none where there is no such token.
  virtual std::optional<int32_t> document_end() const { return {}; }
  // The special token of that name, like "<|im_start|>".
  virtual std::optional<int32_t> special(std::string_view) const { return {}; }
  // The Jinja template of chats that came with the tokenizer; empty: none.
  virtual std::string_view chat_template() const { return {}; }
  // The files by which other programs know this tokenizer, by name; none for one that only we have.
  virtual std::map<std::string, std::string> files() const { return {}; }
  // "char", "bytes", "bpe" or "hub".
  virtual std::string_view kind() const = 0;
  // One JSON object, which from_json() reads back.
  virtual std::string to_json() const = 0;

  // Reads what to_json() wrote. `what` names the file in messages. Throws InputError on anything unexpected.
  static std::unique_ptr<Tokenizer> from_json(std::string_view json, const std::string& what);
  // from_json() of a file.
  static std::unique_ptr<Tokenizer> load(const std::filesystem::path& file);
  // The tokenizer of a folder: tokenizer.json (ours, or a Hugging Face one with the files that belong to it), else
  // vocab.json and merges.txt. Throws InputError naming file, key or line.
  static std::unique_ptr<Tokenizer> open_folder(const std::filesystem::path& folder);
};

// One token per Unicode character of a given set.
class CharTokenizer final : public Tokenizer {
 public:
  // The characters must be strictly ascending and not empty. Throws InputError.
  explicit CharTokenizer(std::vector<char32_t> characters);
  // The characters of `text`. Throws InputError (naming `what` and the byte offset) when it is not UTF-8, or empty.
  static CharTokenizer of_text(std::string_view text, const std::string& what);

  int64_t vocab_size() const override { return static_cast<int64_t>(characters_.size()); }
  std::vector<int32_t> encode(std::string_view text) const override;
  std::string decode(std::span<const int32_t> tokens) const override;
  std::string_view kind() const override { return "char"; }
  std::string to_json() const override;

 private:
  std::vector<char32_t> characters_;
  std::unordered_map<char32_t, int32_t> index_;
};

// One token per byte; takes any input.
class ByteTokenizer final : public Tokenizer {
 public:
  int64_t vocab_size() const override { return 256; }
  std::vector<int32_t> encode(std::string_view text) const override;
  std::string decode(std::span<const int32_t> tokens) const override;
  std::string_view kind() const override { return "bytes"; }
  std::string to_json() const override;
};

}  // namespace tessera
