// A dataset: a directory with train.tok (or shards, train-00000.tok and on), val.tok, tokenizer.json and dataset.json.
#pragma once

#include "data/text.h"
#include "data/token_file.h"
#include "data/tokenizer.h"

namespace tessera {

inline constexpr std::string_view kDatasetFormat = "tessera dataset";

// The statements of dataset.json about the other files.
struct DatasetDescription {
  std::string source;
  int64_t train_bytes = 0, val_bytes = 0;
  int64_t train_tokens = 0, val_tokens = 0;
  std::vector<std::string> train_files{"train.tok"};  // beside it
  std::string note = {};                              // on its texts; empty: none
};
// `what` names it in messages. Throws InputError.
DatasetDescription parse_description(std::string_view json, const std::string& what);

class ExampleRows;  // data/examples.h
struct Dataset;

// One of those that a mixture is made of: of the sum of all shares, so many sequences are its.
struct MixturePart {
  std::string name;
  int64_t share = 1;
  std::shared_ptr<const Dataset> dataset;
};

struct Dataset {
  std::string source;  // the text it was made from
  std::filesystem::path directory;
  std::vector<TokenFile> train;  // a text's file or shards; or, from a JSONL file for fine-tuning, examples:
  TokenFile val;
  std::shared_ptr<const ExampleRows> train_examples = {}, val_examples = {};
  std::vector<MixturePart> parts = {};  // or, of a mixture, all that is in it (data/mixture.h)
  std::shared_ptr<const Tokenizer> tokenizer;
  int64_t table = 0;        // rows of the model's table, where the tokenizer has more tokens: none of them is met
  int64_t train_bytes = 0;  // bytes of text, or of the examples' trained parts, per split; 0: not counted
  int64_t val_bytes = 0;
  std::vector<std::string> notes = {};  // notes about it for a user

  int64_t vocab() const { return table > 0 ? table : tokenizer->vocab_size(); }
  int64_t train_tokens() const;
  int64_t val_tokens() const;
  bool has_examples() const;
  // Tokens that a model can be given to go on from, as it met them in training.
  std::vector<int32_t> prompt() const;
  // The validation split in rows of `context` tokens, which examples were made for already. A mixture has none: each of
  // its parts has its own.
  std::shared_ptr<const Rows> validation(int64_t context) const;

  // Throws InputError for a token beyond the rows of a model's table; 0: all have one. Examples were asked before.
  // Cost: nothing where the tokenizer has no more tokens, else a pass over all of them.
  void check_tokens(int64_t rows) const;
  // Hashes that tell it from any other: of "data", "validation" and "vocabulary".
  std::map<std::string, std::string> checksums() const;
  // Bits per byte of the validation text that a mean loss in nats per token means; independent of the tokenizer. Of a
  // mixture, of text that is mixed as it is.
  double bits_per_byte(double nats_per_token) const;

  // Opens a directory that make_dataset() made and checks that its files fit together. Throws InputError.
  static Dataset open(const std::filesystem::path& directory);
};

// The bytes of the text that the tokens [begin, end) of a file mean; a special token has none.
int64_t token_bytes(const TokenFile& tokens, int64_t begin, int64_t end, const Tokenizer& tokenizer);

// Makes a dataset at `directory` from a text; the files are written beside and the directory is renamed. Of a bpe
// tokenizer the directory gets vocab.json and merges.txt too. Throws OutputError if `directory` exists or cannot be
// written, InputError for a text that the tokenizer cannot take, Error (usage) for a choice that names none.
Dataset make_dataset(const Text& text, const TokenizerChoice& tokenizer, const std::filesystem::path& directory);

// The same from several sources, one behind the other, each of which is known by name, a text file, or documents, the
// texts of a JSONL file ({"text": ...} on each line, maybe compressed): the last tenth of these, at least one, is held
// out. Behind each document stands the token that ends documents, or where the tokenizer has none an empty line. A
// tokenizer that is learnt learns from all sources. With `shard_tokens` the tokens to train on are in files of so many,
// the last of up to twice as many. Throws InputError naming file and line. Cost: two passes over each source, and a
// third where the tokenizer is learnt; some 100 MB of memory, whatever the sources' size.
Dataset make_dataset_from(const std::vector<std::string>& sources, const TokenizerChoice& tokenizer,
                          const std::filesystem::path& directory, int64_t shard_tokens = 0);
// Documents, in the cache.
Dataset dataset_of_documents(const std::filesystem::path& file, const TokenizerChoice& tokenizer);

// The same from llm.c's token files: `file`, and for validation the one whose name has "val" where this one has "train"
// or, when there is none, its own last tenth. The tokenizer must be a folder: the files do not hold theirs.
Dataset import_llmc(const std::filesystem::path& file, const TokenizerChoice& tokenizer,
                    const std::filesystem::path& directory);

// The dataset for what `--data` says: "austen", "tinyshakespeare", a text file, llm.c's token file or several of them
// (data/dataset.h), or a dataset directory (which has its own tokenizer: another one is refused). A text is tokenized
// once and kept in the cache under its content and tokenizer. Throws Error, InputError or OutputError.
Dataset dataset_for(const std::string& spec, const TokenizerChoice& tokenizer, const HeldOut& held = {});

// Token files of llm.c that are trained on together, each where it lies: the shards of a large text.

// The regular files that a pattern of the shell (*, ?, [...]) matches, in the order of their names' bytes. None where
// `spec` is no pattern, or itself the name of something. Throws InputError where a pattern matches nothing.
std::vector<std::filesystem::path> matching_files(const std::string& spec, std::string_view said_by = "");

// Whether it names such files: by a pattern, or as a folder that holds some and no dataset.json.
bool names_shards(const std::string& spec);

// Those to train on, and the one to validate on: the first with "val" in its name, else the first that the pattern
// matches when its last "train" is replaced by "val", else the last of all. Throws InputError: a file of another kind,
// fewer than two.
struct ShardFiles {
  std::vector<std::filesystem::path> train;
  std::filesystem::path val;
  std::vector<std::filesystem::path> unused = {};  // more with "val" in their names
};
ShardFiles find_shards(const std::string& spec);

// Their tokens; the tokenizer must be a folder, since the files do not hold theirs. Throws Error (usage), InputError.
Dataset open_shards(const std::string& spec, const TokenizerChoice& tokenizer);

}  // namespace tessera
