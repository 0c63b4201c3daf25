// Tokenizers: text to integer tokens and back.
//
// `char` numbers the Unicode characters of the training text by code point; `bytes` has the 256 byte values; `bpe`
// merges bytes into frequent words; `hub` is a Hugging Face tokenizer.json. All share one encoder, configured by a
// description (data/tokenizer/). A tokenizer is stored as one JSON file next to the tokens or checkpoint that it
// belongs to.
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
  bool add_ends = false;         // add the tokenizer's own beginning and end of a text (bos, eos or none)
  bool begins = true;            // false: the text continues other tokens and gets no marker of its beginning
  bool first = true;             // false: follows a special token, so it begins a segment but not the text
  int64_t offset = 0;            // of the text's first byte, for error messages
};

class Tokenizer {
 public:
  virtual ~Tokenizer() = default;

  virtual int64_t vocab_size() const = 0;
  // The tokens of a text, each in [0, vocab_size()). Throws Error (usage) naming the character and offset that cannot
  // be encoded.
  std::vector<int32_t> encode(std::string_view text) const { return encode_with(text, {}); }
  virtual std::vector<int32_t> encode_with(std::string_view text, const EncodeOptions& options) const = 0;
  // The text of tokens; special tokens appear by name. Incomplete characters are returned as raw bytes; use
  // StreamDecoder to display a growing text. Throws Error (usage) for a token outside the vocabulary.
  virtual std::string decode(std::span<const int32_t> tokens) const = 0;
  // The bytes that a token appends to a text. (decode() may strip the space of a text's first word.)
  virtual std::string token_bytes(int32_t token) const = 0;
  // The tokens that it inserts at the beginning of a text.
  virtual std::span<const int32_t> beginning() const = 0;
  // The token that begins a text (bos), if any.
  std::optional<int32_t> bos() const { return bos_; }
  // The token that ends a text and separates documents (eos, <|endoftext|>), if any.
  std::optional<int32_t> document_end() const { return eos_; }
  // The special token with a name such as "<|im_start|>".
  virtual std::optional<int32_t> special(std::string_view name) const = 0;
  // Adds the number of occurrences of each special token's name in a text to `counts`.
  virtual void count_special(std::string_view text, std::map<std::string, int64_t>& counts) const;
  // Token names by role ("bos_token"), if the tokenizer's files define them.
  virtual std::map<std::string, std::string> named_tokens() const { return {}; }
  // The Jinja chat template of the tokenizer's files, or empty.
  virtual std::string_view chat_template() const { return {}; }
  // The contents of generation_config.json for a model with this tokenizer: token ids of beginning, end and padding, if
  // any, and further settings of the tokenizer's files.
  virtual std::string generation_config() const;
  // The files by which other programs load this tokenizer and these settings, by name.
  virtual std::map<std::string, std::string> files() const = 0;
  // "char", "bytes", "bpe" or "hub".
  std::string_view kind() const { return kind_; }
  // One JSON object, the input of from_json().
  virtual std::string to_json() const = 0;
  // Whether a token absorbs the white space before it in a text, and after it.
  virtual std::pair<bool, bool> strips(int32_t) const { return {}; }
  // Equal for tokenizers that encode every text identically, judged by their files.
  std::string identity() const;

  // Parses the result of to_json(). `what` names the file in errors. Throws InputError for any invalid content.
  static std::unique_ptr<Tokenizer> from_json(std::string_view json, const std::string& what);
  static std::unique_ptr<Tokenizer> load(const std::filesystem::path& file);
  // The tokenizer of a directory: tokenizer.json (of Tessera, or of Hugging Face with its companion files), otherwise
  // vocab.json and merges.txt. Throws InputError naming file, key or line.
  static std::unique_ptr<Tokenizer> open_folder(const std::filesystem::path& folder);

 protected:
  explicit Tokenizer(std::string_view kind) : kind_(kind) {}

  std::string_view kind_;
  std::optional<int32_t> bos_ = {}, eos_ = {};
};

// A note on how names of special tokens in texts are encoded: as these tokens, or as text; empty if none occurred.
std::string special_note(const std::map<std::string, int64_t>& counts, bool as_tokens);

// The tokens at which generation stops, by the tokenizer's settings. Throws InputError.
std::vector<int32_t> generation_ends(const Tokenizer& tokenizer);

// The tokenizer for a text, as specified by the option `tokenizer`.
struct TokenizerChoice {
  std::string name = {};  // char, bytes, bpe, or a directory (Tokenizer::open_folder); empty: `otherwise`
  std::string otherwise = "char";
  int64_t vocab_size = 50257;           // of a bpe tokenizer to train
  std::vector<std::string> added = {};  // additional special tokens
  std::string end = {};                 // the special token that ends a text; empty: the tokenizer's own
  bool special = false;                 // names of special tokens in a text encode as these tokens
  // Called periodically with a progress line while texts are read and a tokenizer is trained; `note` with messages
  // about the trained tokenizer for the user.
  std::function<void(const std::string&line)> progress = nullptr, note = nullptr;

  std::string_view chosen() const { return name.empty() ? otherwise : name; }
  bool learns() const { return chosen() == "char" || chosen() == "bpe"; }  // from the texts to train on
};

// Calls f for the chunks of a text, in order; `held`: held out from training.
using TextWalk = std::function<void(const std::function<void(std::string_view piece, bool held)>& f)>;

// The tokenizer for a text named `what`: char uses all characters of the text, bpe is trained on the training split, a
// directory is loaded without reading the text. Throws Error (usage) for any other name, InputError.
std::unique_ptr<Tokenizer> make_tokenizer(const TokenizerChoice& choice, const std::string& what,
                                          const TextWalk& text = nullptr);

// Encodes a text of any length chunk by chunk in about 100 MB of memory; the result equals encode() of the full text.
// It splits between white space and another character, at a position where the tokens of a few thousand surrounding
// bytes are the same with and without the split; char and bytes tokenizers split between any two characters.
class TextEncoder {
 public:
  using Each = std::function<void(std::span<const int32_t> tokens)>;
  // `add_ends` and `special` (special_in_text) as in EncodeOptions; `chunk`: minimum bytes encoded at a time. The
  // tokenizer must outlive this; `what` names the text.
  TextEncoder(const Tokenizer& tokenizer, std::string what, Each each, bool add_ends = false,
              size_t chunk = size_t{8} << 20, bool special = false);
  // Throws Error as encode() does, and InputError if eight chunks contain no position to split at.
  void add(std::string_view piece);
  void finish();
  // Occurrences of each special token's name.
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
  std::vector<int32_t> behind_ = {};
  int64_t done_ = 0;  // in bytes
  std::string waiting_ = {};
};

// A tokenizer with the added tokens, which the Hugging Face library then knows too: existing tokens retain their ids,
// new ones follow the last. Throws Error (usage) for an end that is not a special token, and for a char tokenizer,
// which supports only characters.
std::unique_ptr<Tokenizer> with_tokens(std::unique_ptr<Tokenizer> tokenizer, const TokenizerChoice& choice);

// Identifies this choice in names of the cache: "char", "bytes", "bpe50257", or a hash of the directory's files. Throws
// as make_tokenizer() does.
std::string cache_name(const TokenizerChoice& choice);

// Throws Error (usage) unless the choice is a directory, for a token file without a tokenizer.
void require_folder(const std::string& file, const TokenizerChoice& choice);

// Whether a tokenizer matches the choice; an empty name matches any tokenizer, `bpe` any bpe tokenizer.
bool fits(const TokenizerChoice& choice, const Tokenizer& tokenizer);

// Throws Error naming `what` for a token that is not below `rows`, the rows of a model's embedding; 0: unlimited.
void check_in_table(std::span<const int32_t> tokens, int64_t rows, const Tokenizer& tokenizer, const std::string& what);

// Decodes a token stream to valid UTF-8. A token may end inside a multi-byte character, whose bytes wait for the tokens
// that complete it. Bytes that can never become a character appear as U+FFFD (for programs) or escaped, `\xe9` (for
// people). Assumes that the text follows a prompt. The tokenizer must outlive this.
class StreamDecoder {
 public:
  enum class Broken { replaced, escaped };
  explicit StreamDecoder(const Tokenizer& tokenizer, Broken broken = Broken::replaced)
      : tokenizer_(&tokenizer), broken_(broken) {}

  // The characters completed by this token, if any. Throws Error (usage) as decode() does.
  std::string add(int32_t token);
  // Ends the text: returns the replacement of pending bytes, if any.
  std::string end();

 private:
  std::string shown(std::string_view bytes) const;

  const Tokenizer* tokenizer_;
  Broken broken_;
  std::string waiting_;  // of an incomplete character
};

}  // namespace tessera
