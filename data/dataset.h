// A dataset: a directory with train.tok (or shards train-00000.tok, ...), val.tok, tokenizer.json and dataset.json.
#pragma once
#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "data/loader.h"
#include "data/text.h"
#include "data/tokenizer.h"

namespace tessera {

inline constexpr std::string_view kDatasetFormat = "tessera dataset";

struct DatasetDescription {
  std::string source;
  int64_t train_bytes = 0, val_bytes = 0;
  int64_t train_tokens = 0, val_tokens = 0;
  std::vector<std::string> train_files{"train.tok"};  // next to dataset.json
  std::string note = {};                              // about the texts
};
// Throws InputError.
DatasetDescription parse_description(std::string_view json, const std::string& what);

class ExampleRows;  // data/examples.h
struct Dataset;

// A component of a mixture, with `ratio` / (sum of ratios) of the sequences.
struct MixturePart {
  std::string name;
  int64_t ratio = 1;
  std::shared_ptr<const Dataset> dataset;
};

struct Dataset {
  std::string source;  // origin of the text
  std::filesystem::path directory;
  std::vector<TokenFile> train;  // of a text; examples of a JSONL file are in train_examples
  TokenFile val;
  std::shared_ptr<const ExampleRows> train_examples = {}, val_examples = {};
  std::vector<MixturePart> parts = {};  // components of a mixture (data/mixture.h)
  std::shared_ptr<const Tokenizer> tokenizer;
  int64_t table = 0;        // embedding rows of the model, if below the vocabulary; all tokens are then below `table`
  int64_t train_bytes = 0;  // per split, of text or of the examples' targets; 0: unknown
  int64_t val_bytes = 0;
  std::vector<std::string> notes = {};  // for the user

  int64_t vocab() const { return table > 0 ? table : tokenizer->vocab_size(); }
  int64_t train_tokens() const;
  int64_t val_tokens() const;
  bool has_examples() const;
  // A prompt from the validation data, in the training format.
  std::vector<int32_t> prompt() const;
  // Rows of `context` tokens; examples are already packed for a context. Throws Error for a mixture: validate its
  // components separately.
  std::shared_ptr<const Rows> validation(int64_t context) const;

  // Throws InputError for a token that is not below `rows`, the embedding rows (0: unlimited). Loading already checks
  // examples. Cost: a pass over all tokens if `rows` is below the vocabulary, otherwise none.
  void check_tokens(int64_t rows) const;
  // Content hashes of "data", "validation" and "vocabulary".
  std::map<std::string, std::string> checksums() const;
  // Converts a mean loss in nats per token to bits per byte of validation text, which is independent of the tokenizer.
  // For a mixture: per byte of its components in their proportions.
  double bits_per_byte(double nats_per_token) const;

  // Validates the directory. Throws InputError.
  static Dataset open(const std::filesystem::path& directory);
};

// Bytes of text; special tokens count 0.
int64_t token_bytes(const TokenFile& tokens, int64_t begin, int64_t end, const Tokenizer& tokenizer);

// Writes atomically: a temporary directory is renamed. A bpe tokenizer is also stored as vocab.json and merges.txt.
// Throws OutputError if `directory` exists or cannot be written, InputError if the tokenizer cannot encode the text,
// Error (usage) if the choice names no tokenizer.
Dataset make_dataset(const Text& text, const TokenizerChoice& tokenizer, const std::filesystem::path& directory);

// Concatenates sources: names of built-in texts, text files, or documents, that is, JSONL files of {"text": ...}
// (possibly compressed), of which the last tenth, at least one, is held out. The tokenizer's end-of-document token, or
// an empty line if it has none, follows every document. The tokenizer is trained on all sources. Files have
// `shard_tokens` training tokens (0: all), the last up to twice as many. Throws InputError naming file and line. Cost:
// two passes over each source, a third if the tokenizer is trained; about 100 MB of memory.
Dataset make_dataset_from(const std::vector<std::string>& sources, const TokenizerChoice& tokenizer,
                          const std::filesystem::path& directory, int64_t shard_tokens = 0);
// One JSONL file of documents, cached.
Dataset dataset_of_documents(const std::filesystem::path& file, const TokenizerChoice& tokenizer);

// llm.c token files: `file`, validated on the file whose name has "val" in place of "train", otherwise on its own last
// tenth. The tokenizer must be a directory because the files do not contain one.
Dataset import_llmc(const std::filesystem::path& file, const TokenizerChoice& tokenizer,
                    const std::filesystem::path& directory);

// The value of `--data`: "austen", "tinyshakespeare", a text file, llm.c token files, or a dataset directory, which
// contains its tokenizer and rejects any other. A text is tokenized once and cached by content and tokenizer. Throws
// Error, InputError or OutputError.
Dataset dataset_for(const std::string& spec, const TokenizerChoice& tokenizer, const HeldOut& held = {});

}  // namespace tessera
