// Examples for fine-tuning as rows of tokens. Tokens outside responses are not targets; rows are padded with token 0
// and ignored targets.
//
//   one example per row       p p p r r . . .          p: prompt, r: response, .: padding
//   packed                    p p r|p r r r|p p r r    attention is limited to each example (`document_mask`)
#pragma once
#include <array>
#include <cstdint>
#include <filesystem>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "data/chat_template.h"
#include "data/dataset.h"

namespace tessera {

struct EncodedExample {
  std::vector<int32_t> tokens;
  std::vector<bool> trained;  // per token: is it a target?
  int64_t bytes = 0;          // of the targets' text; markers and special tokens count 0
};

// Excludes the first token, which no position predicts.
int64_t count_targets(const EncodedExample& example);

class ExampleRows final : public Rows {
 public:
  // Each example has a target and at most context + 1 tokens. Examples are packed longest first, each into the row with
  // the smallest sufficient free space (best fit).
  ExampleRows(const std::vector<EncodedExample>& examples, int64_t context, bool packed);

  int64_t context() const override { return context_; }
  int64_t count() const override { return std::ssize(row_ends_); }
  int64_t length(int64_t row) const override;
  bool is_padded() const override { return true; }
  int64_t targets() const override { return targets_; }
  bool has_starts() const override { return packed_; }
  int64_t count_targets(int64_t row) const { return row_targets_[static_cast<size_t>(row)]; }

  int64_t examples() const { return std::ssize(begins_) - 1; }
  int64_t tokens() const { return std::ssize(tokens_); }
  int64_t bytes() const { return bytes_; }  // of the targets' text
  // The first example up to its first target.
  std::vector<int32_t> prompt() const;
  uint64_t checksum() const;

 private:
  void load_row(int64_t row, int32_t* inputs, int32_t* targets) const override;
  void row_starts(int64_t row, int32_t* out) const override;
  // Calls f(example, offset in the row) and returns the end of the last example.
  template <class F>
  int64_t walk(int64_t row, const F& f) const;

  int64_t context_;
  bool packed_;
  std::vector<int32_t> tokens_;
  std::vector<uint8_t> trained_;
  std::vector<int64_t> begins_{0};  // offset of each example, and end of the last
  std::vector<int64_t> members_;    // examples, row by row
  std::vector<int64_t> row_ends_;   // indices in members_
  std::vector<int64_t> row_targets_;
  int64_t targets_ = 0, bytes_ = 0;
};

struct ExampleOptions {
  ChatTemplate style = ChatTemplate::automatic;
  bool responses_only = true;
  bool packed = false;
  bool skip_bad = false;
  HeldOut held = {};
  bool ends = true;      // EncodeOptions::add_ends
  bool special = false;  // EncodeOptions::special_in_text, in messages
  RowNames names = {};   // alternative keys and roles
  int64_t context = 0;
  int64_t vocab = 0;  // embedding rows; 0: the vocabulary
  // Limit on rows: reading them needs about 16 times their size in memory.
  int64_t max_bytes = std::numeric_limits<int64_t>::max();
};

// The prompt up to the assistant's turn, and what ends the answer: end tokens, or stop strings if the tokenizer has no
// such token. If `turns` is empty, `tokens` is empty. Throws Error (usage) naming the field `template` if `automatic`
// finds no template; InputError.
struct Asked {
  std::vector<int32_t> tokens = {}, ends = {};
  std::vector<std::string> stops = {};
};
Asked ask(const std::vector<Message>& turns, const ExampleOptions& options, const Tokenizer& tokenizer);

// The files are those of example_files(). The last tenth of the rows, at least one, is held out for validation unless
// `held` or a directory specifies otherwise. Throws InputError naming file and line of the first untrainable row,
// unless `skip_bad` is set. Dataset::notes reports skipped and truncated rows, markers unknown to the tokenizer, and
// unused keys. A row that begins with text rather than a template's marker starts with the special tokens
// that the tokenizer adds at the beginning. For messages, the automatic template is the tokenizer's own, if any.
Dataset load_examples(const std::filesystem::path& spec, const TokenizerChoice& tokenizer,
                      const ExampleOptions& options);

// No examples are held out; in a directory, only validation files are read, if any.
std::shared_ptr<const ExampleRows> all_examples(const std::filesystem::path& spec, const Tokenizer& tokenizer,
                                                const ExampleOptions& options, std::vector<std::string>& notes);

struct EvaluationText {
  std::shared_ptr<const Rows> rows;
  int64_t bytes = 0;                    // of the text, or of the examples' targets
  std::vector<std::string> notes = {};  // for the user
};

// Loads a text file (possibly compressed), an llm.c token file, the validation file among several, the validation split
// of a `tessera data` directory, or a file of examples. A text is one sequence, including the special tokens that the
// tokenizer adds at its beginning and end, and is split into consecutive windows of options.context tokens; each token
// except the first is predicted once. Throws InputError; Error (usage) for a directory with another tokenizer.
EvaluationText evaluation_text(const std::string& spec, const Tokenizer& tokenizer, const ExampleOptions& options);

}  // namespace tessera
