// Tokenizers: text to integer tokens and back.
//
// `char` numbers the Unicode characters that occur in the training text, in order of code point; `bytes` is the 256
// byte values; `bpe` joins bytes into frequent words; `hub` is one that others made and saved as a Hugging Face
// tokenizer.json. All are descriptions for one way of encoding (data/tokenizer/). A tokenizer travels as one JSON file
// beside the tokens or the checkpoint that it belongs to.
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
  bool special_in_text = false;  // special tokens whose names stand in the text are meant; otherwise they are text
  bool add_ends = false;         // adds what the tokenizer puts before a text and after it: bos, eos, or nothing
  bool begins = true;            // false: the text goes on behind other tokens, so that nothing marks its beginning
  bool first = true;             // false: behind a special token it begins anew, but not the whole text
  int64_t offset = 0;            // of the text's first byte, for messages
};

class Tokenizer {
 public:
  virtual ~Tokenizer() = default;

  virtual int64_t vocab_size() const = 0;
  // The tokens of a text, each in [0, vocab_size()). Throws Error (usage) naming what cannot be encoded, and where.
  std::vector<int32_t> encode(std::string_view text) const { return encode_with(text, {}); }
  // The same with what the options ask for.
  virtual std::vector<int32_t> encode_with(std::string_view text, const EncodeOptions& options) const = 0;
  // The text of some tokens, special ones by their names. Bytes that are no whole character stay as they are: to show
  // a text while it grows, see StreamDecoder. Throws Error (usage) for a token outside the vocabulary.
  virtual std::string decode(std::span<const int32_t> tokens) const = 0;
  // The bytes that a token adds to a text that has begun. (The first word of a text may lose its space in decode().)
  virtual std::string token_bytes(int32_t token) const = 0;
  // The tokens that it puts before a text by itself.
  virtual std::span<const int32_t> beginning() const = 0;
  // The token that begins a text (bos), where there is one.
  std::optional<int32_t> bos() const { return bos_; }
  // The token that ends a text and stands between documents: eos, <|endoftext|>; none where there is no such token.
  std::optional<int32_t> document_end() const { return eos_; }
  // The special token of that name, like "<|im_start|>".
  virtual std::optional<int32_t> special(std::string_view name) const = 0;
  // Adds to `counts` how often the name of each special token occurs in a text.
  virtual void count_special(std::string_view text, std::map<std::string, int64_t>& counts) const;
  // The names of tokens by what they are for, as "bos_token", where they came with the tokenizer.
  virtual std::map<std::string, std::string> named_tokens() const { return {}; }
  // The Jinja template of chats that came with the tokenizer; empty: none.
  virtual std::string_view chat_template() const { return {}; }
  // The settings that a model with this tokenizer writes by, as generation_config.json has them: the ids of beginning,
  // end and padding where there are such, and what else came with the tokenizer.
  virtual std::string generation_config() const;
  // The files by which other programs know this tokenizer and these settings, by name.
  virtual std::map<std::string, std::string> files() const = 0;
  // "char", "bytes", "bpe" or "hub".
  std::string_view kind() const { return kind_; }
  // One JSON object, which from_json() reads back.
  virtual std::string to_json() const = 0;
  // Whether a token absorbs the white space before it in a text, and after it.
  virtual std::pair<bool, bool> strips(int32_t) const { return {}; }
  // Equal for tokenizers that make the same of every text, by their files.
  std::string identity() const;

  // Reads what to_json() wrote. `what` names the file in messages. Throws InputError on anything unexpected.
  static std::unique_ptr<Tokenizer> from_json(std::string_view json, const std::string& what);
  // from_json() of a file.
  static std::unique_ptr<Tokenizer> load(const std::filesystem::path& file);
  // The tokenizer of a folder: tokenizer.json (ours, or a Hugging Face one with the files that belong to it), else
  // vocab.json and merges.txt. Throws InputError naming file, key or line.
  static std::unique_ptr<Tokenizer> open_folder(const std::filesystem::path& folder);

 protected:
  explicit Tokenizer(std::string_view kind) : kind_(kind) {}

  std::string_view kind_;
  std::optional<int32_t> bos_ = {}, eos_ = {};
};

// A note on how names of special tokens in texts are read: as these tokens, or as text; empty if there are none.
std::string special_note(const std::map<std::string, int64_t>& counts, bool as_tokens);

// The tokens behind which a model stops to write, by its tokenizer's settings. Throws InputError.
std::vector<int32_t> generation_ends(const Tokenizer& tokenizer);

// The tokenizer that a text gets, as the option `tokenizer` names it.
struct TokenizerChoice {
  std::string name = {};  // char, bytes, bpe, or a tokenizer's folder (Tokenizer::open_folder); empty: `otherwise`
  std::string otherwise = "char";
  int64_t vocab_size = 50257;           // size of a bpe tokenizer that is trained
  std::vector<std::string> added = {};  // special tokens that it gets besides its own
  std::string end = {};                 // the special token that ends a text; empty: its own
  bool special = false;                 // names of special tokens in a text mean these tokens
  // Called now and then with a line on what is done while texts are read and a tokenizer is trained; and with what a
  // user should know of the one that was.
  std::function<void(const std::string&line)> progress = nullptr, note = nullptr;

  std::string_view chosen() const { return name.empty() ? otherwise : name; }
  bool learns() const { return chosen() == "char" || chosen() == "bpe"; }  // from the texts to train on
};

// Calls f for the pieces of a text, in order; `held`: not to train on.
using TextWalk = std::function<void(const std::function<void(std::string_view piece, bool held)>& f)>;

// The tokenizer for a text named `what`: char takes the characters of the whole text, bpe learns from the part to train
// on, a folder is read, and no text. Throws Error (usage) for a name that is none of these, InputError.
std::unique_ptr<Tokenizer> make_tokenizer(const TokenizerChoice& choice, const std::string& what,
                                          const TextWalk& text = nullptr);

// The tokens of a text that comes piece by piece, of any length, in some 100 MB of memory: those that it has as a
// whole. It is cut between white space and something else, where the tokens of a few thousand bytes around the place
// are the same with the cut and without; a text of characters or bytes anywhere between two.
class TextEncoder {
 public:
  using Each = std::function<void(std::span<const int32_t> tokens)>;
  // `add_ends` and `special` (special_in_text) as in EncodeOptions; `chunk`: bytes that are encoded at once, or more.
  // The tokenizer must outlive this; `what` names the text.
  TextEncoder(const Tokenizer& tokenizer, std::string what, Each each, bool add_ends = false,
              size_t chunk = size_t{8} << 20, bool special = false);
  // Throws Error as encode() does, and InputError for a text that has no such place in eight chunks.
  void add(std::string_view piece);
  void finish();
  // How often the name of each special token occurred.
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
  int64_t done_ = 0;  // bytes
  std::string waiting_ = {};
};

// A tokenizer with the tokens that the choice adds, which the Hugging Face library knows then too: one that it has
// keeps its number, as there, and others follow its last. Throws Error (usage): an end that is no special token, or a
// char tokenizer, which knows characters alone.
std::unique_ptr<Tokenizer> with_tokens(std::unique_ptr<Tokenizer> tokenizer, const TokenizerChoice& choice);

// The word that tells this choice from others in the cache's names: "char", "bytes", "bpe50257", or a hash of the
// folder's files. Throws as make_tokenizer() does.
std::string cache_name(const TokenizerChoice& choice);

// Throws Error (usage) where the choice is no folder, for a file of tokens that does not hold its tokenizer.
void require_folder(const std::string& file, const TokenizerChoice& choice);

// Whether a tokenizer is what the choice names; an empty name takes any. `bpe` takes every bpe tokenizer.
bool fits(const TokenizerChoice& choice, const Tokenizer& tokenizer);

// Throws Error that names `what` for a token beyond the rows of a model's table; 0: all have one.
void check_in_table(std::span<const int32_t> tokens, int64_t rows, const Tokenizer& tokenizer, const std::string& what);

// Text from tokens, one after another, without broken characters: a token may end inside a character of several bytes:
// those bytes wait for the tokens that bring the rest. What can never become a character is shown as U+FFFD for
// programs, or by its bytes, `\xe9`, for people, so that everything that comes out is UTF-8. The text is taken to go on
// behind a prompt. The tokenizer must outlive this.
class StreamDecoder {
 public:
  enum class Broken { replaced, escaped };
  explicit StreamDecoder(const Tokenizer& tokenizer, Broken broken = Broken::replaced)
      : tokenizer_(&tokenizer), broken_(broken) {}

  // The characters that are whole after this token; maybe none. Throws Error (usage) as decode() does.
  std::string add(int32_t token);
  // The text ends: what stands for the bytes that still wait, or nothing.
  std::string end();

 private:
  std::string shown(std::string_view bytes) const;

  const Tokenizer* tokenizer_;
  Broken broken_;
  std::string waiting_;  // the beginning of a character
};

}  // namespace tessera
