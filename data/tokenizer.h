// Tokenizers: text to integer tokens and back.
//
// `char` numbers the Unicode characters that occur in the training text, in order of code point; `bytes` is the 256
// byte values; `bpe` (data/bpe/) joins bytes into frequent words. A tokenizer travels as one JSON file beside the
// tokens or the checkpoint that it belongs to.
#pragma once
#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

namespace tessera {

inline constexpr std::string_view kTokenizerFormat = "tessera tokenizer";

class Tokenizer {
 public:
  virtual ~Tokenizer() = default;

  virtual int64_t vocab_size() const = 0;
  // The tokens of a text, each in [0, vocab_size()). Throws Error (usage) naming what cannot be encoded, and where.
  virtual std::vector<int32_t> encode(std::string_view text) const = 0;
  // The text of some tokens. Throws Error (usage) for a token outside the vocabulary.
  virtual std::string decode(std::span<const int32_t> tokens) const = 0;
  // The token that stands between documents, <|endoftext|>; none where the vocabulary has no such token.
  virtual std::optional<int32_t> document_end() const { return {}; }
  // "char", "bytes" or "bpe".
  virtual std::string_view kind() const = 0;
  // One JSON object, which from_json() reads back.
  virtual std::string to_json() const = 0;

  // Reads what to_json() wrote. `what` names the file in messages. Throws InputError on anything unexpected.
  static std::unique_ptr<Tokenizer> from_json(std::string_view json, const std::string& what);
  // from_json() of a file.
  static std::unique_ptr<Tokenizer> load(const std::filesystem::path& file);
  // The tokenizer of a folder: tokenizer.json, or vocab.json and merges.txt as GPT-2's are. Throws InputError.
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
