// Tokenizers. `char` numbers the Unicode characters of the training text by code point; `bytes` has the 256 byte
// values; `bpe` merges bytes into frequent words; `hub` is a Hugging Face tokenizer.json. All share one encoder,
// configured by a description (data/tokenizer/).
#pragma once
#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace tessera {

inline constexpr std::string_view kTokenizerFormat = "tessera tokenizer";

struct EncodeOptions {
  bool special_in_text = false;  // names of special tokens in the text encode as these tokens
  bool add_ends = false;         // add the tokenizer's special tokens at the beginning and end (BOS, EOS or none)
  bool begins = true;            // false: the text continues other tokens, without a beginning marker
  bool first = true;             // false: the text follows a special token, so it begins a segment but not the text
  int64_t offset = 0;            // of the first byte, for errors
};

class Tokenizer {
 public:
  virtual ~Tokenizer() = default;

  virtual int64_t vocab_size() const = 0;
  // Throws Error (usage) naming the character and offset that cannot be encoded.
  std::vector<int32_t> encode(std::string_view text) const { return encode_with(text, {}); }
  virtual std::vector<int32_t> encode_with(std::string_view text, const EncodeOptions& options) const = 0;
  // Special tokens appear by name, incomplete characters as raw bytes. Throws Error (usage) for a token outside the
  // vocabulary.
  virtual std::string decode(std::span<const int32_t> tokens) const = 0;
  // The bytes that a token appends; decode() may strip the space of the first word.
  virtual std::string token_bytes(int32_t token) const = 0;
  // Inserted before a text.
  virtual std::span<const int32_t> beginning() const = 0;
  std::optional<int32_t> bos() const { return bos_; }
  // Ends a text and separates documents: eos, <|endoftext|>.
  std::optional<int32_t> document_end() const { return eos_; }
  // By name: "<|im_start|>".
  virtual std::optional<int32_t> special(std::string_view name) const = 0;
  // Adds the occurrences of each special token's name to `counts`.
  virtual void count_special(std::string_view text, std::map<std::string, int64_t>& counts) const;
  // By role ("bos_token"), if the tokenizer's files define them.
  virtual std::map<std::string, std::string> named_tokens() const { return {}; }
  // Jinja source; may be empty.
  virtual std::string_view chat_template() const { return {}; }
  // Token ids of beginning, end and padding, and other settings of the tokenizer's files, for a model with this
  // tokenizer.
  virtual std::string generation_config() const;
  // The files by which other programs load this tokenizer, by name.
  virtual std::map<std::string, std::string> files() const = 0;
  // "char", "bytes", "bpe" or "hub".
  std::string_view kind() const { return kind_; }
  // The input of from_json().
  virtual std::string to_json() const = 0;
  // Whether a token absorbs the white space before and after it.
  virtual std::pair<bool, bool> strips(int32_t) const { return {}; }
  // Equal for tokenizers that encode every text identically, judged by their files.
  std::string identity() const;

  // Throws InputError for any invalid content.
  static std::unique_ptr<Tokenizer> from_json(std::string_view json, const std::string& what);
  static std::unique_ptr<Tokenizer> load(const std::filesystem::path& file);
  // Reads tokenizer.json (of Tessera, or of Hugging Face with its companion files), otherwise vocab.json and
  // merges.txt. Throws InputError naming file, key or line.
  static std::unique_ptr<Tokenizer> open_folder(const std::filesystem::path& folder);

 protected:
  explicit Tokenizer(std::string_view kind) : kind_(kind) {}

  std::string_view kind_;
  std::optional<int32_t> bos_ = {}, eos_ = {};
};

// Reports how names of special tokens in texts were encoded; empty if none occurred.
std::string special_note(const std::map<std::string, int64_t>& counts, bool as_tokens);

// Tokens that stop generation. Throws InputError.
std::vector<int32_t> generation_ends(const Tokenizer& tokenizer);

// The option `tokenizer`.
struct TokenizerChoice {
  std::string name = {};  // char, bytes, bpe, or a directory (Tokenizer::open_folder); empty: `otherwise`
  std::string otherwise = "char";
  int64_t vocab_size = 50257;           // of a bpe tokenizer to be trained
  std::vector<std::string> added = {};  // additional special tokens
  std::string end = {};                 // end-of-text token; empty: the tokenizer's own
  bool special = false;                 // EncodeOptions::special_in_text
  // `progress` receives lines while texts are read and a tokenizer is trained; `note`, messages about the result.
  std::function<void(const std::string&line)> progress = nullptr, note = nullptr;

  std::string_view chosen() const { return name.empty() ? otherwise : name; }
  bool learns() const { return chosen() == "char" || chosen() == "bpe"; }  // from the training texts
};

// Calls f for successive chunks of a text; `held`: held out from training.
using TextWalk = std::function<void(const std::function<void(std::string_view chunk, bool held)>& f)>;

// char uses all characters of the text, bpe is trained on the training split, a directory is loaded without reading the
// text. Throws Error (usage) for any other name; InputError.
std::unique_ptr<Tokenizer> make_tokenizer(const TokenizerChoice& choice, const std::string& what,
                                          const TextWalk& text = nullptr);

// Encodes a text of any length by chunks in about 100 MB of memory; the result equals encode() of the full text. Splits
// between white space and another character, where the tokens of a few thousand surrounding bytes are the same with and
// without the split; char and bytes tokenizers split between any two characters.
class TextEncoder {
 public:
  using Each = std::function<void(std::span<const int32_t> tokens)>;
  // `special`: special_in_text; `chunk`: minimum bytes encoded at a time. The tokenizer must outlive the encoder.
  TextEncoder(const Tokenizer& tokenizer, std::string what, Each each, bool add_ends = false,
              size_t chunk = size_t{8} << 20, bool special = false);
  // Throws Error as encode() does; InputError if eight chunks contain no position to split at.
  void add(std::string_view text);
  void finish();
  const std::map<std::string, int64_t>& special_names() const { return names_; }

 private:
  void encode(std::string_view chunk);
  bool may_cut(std::string_view left, std::string_view right) const;

  const Tokenizer& tokenizer_;
  std::string what_;
  Each each_;
  size_t chunk_;
  bool special_;
  std::map<std::string, int64_t> names_ = {};
  std::vector<int32_t> after_ = {};
  int64_t done_ = 0;  // bytes
  std::string waiting_ = {};
};

// Adds tokens that the Hugging Face library also recognizes: existing tokens retain their ids, new ones follow the
// last. Throws Error (usage) for an end that is not a special token, and for a char tokenizer.
std::unique_ptr<Tokenizer> with_tokens(std::unique_ptr<Tokenizer> tokenizer, const TokenizerChoice& choice);

// "char", "bytes", "bpe50257", or a hash of the directory's files. Throws as make_tokenizer() does.
std::string cache_name(const TokenizerChoice& choice);

// For token files, which contain no tokenizer: throws Error (usage) unless the choice is a directory.
void require_folder(const std::string& file, const TokenizerChoice& choice);

// An empty name matches any tokenizer, `bpe` any bpe tokenizer.
bool fits(const TokenizerChoice& choice, const Tokenizer& tokenizer);

// Throws Error for a token that is not below `rows`, the embedding rows; 0: unlimited.
void check_in_table(std::span<const int32_t> tokens, int64_t rows, const Tokenizer& tokenizer, const std::string& what);

// Decodes a token stream to valid UTF-8, after a prompt. Incomplete characters wait for the next tokens. Bytes that can
// never become a character appear as U+FFFD (for programs) or escaped, `\xe9` (for people). The tokenizer must outlive
// the decoder.
class StreamDecoder {
 public:
  enum class Broken { replaced, escaped };
  explicit StreamDecoder(const Tokenizer& tokenizer, Broken broken = Broken::replaced)
      : tokenizer_(&tokenizer), broken_(broken) {}

  // Returns the completed characters. Throws Error (usage) as decode() does.
  std::string add(int32_t token);
  // Returns the replacement of pending bytes, if any.
  std::string end();

 private:
  std::string shown(std::string_view bytes) const;

  const Tokenizer* tokenizer_;
  Broken broken_;
  std::string waiting_;  // an incomplete character
};

}  // namespace tessera
