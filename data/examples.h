// Examples as rows of tokens: what fine-tuning trains on. A token that is no part of a response is read and never a
// target; what is left of a row is filled with token 0 and no targets.
//
//   one example to a row      p p p r r . . .          p: prompt, r: response, .: nothing
//   packed                    p p r|p r r r|p p r r    attention stays within an example (`document_mask`)
#pragma once

#include "data/dataset.h"
#include "data/jsonl.h"

namespace tessera {

struct EncodedExample {
  std::vector<int32_t> tokens;
  std::vector<bool> trained;  // whether each token is a target
  int64_t bytes = 0;          // of the targets' text: markers and special tokens have none
};

// How many targets an example has: what is trained and is not the first token, which nothing predicts.
int64_t count_targets(const EncodedExample& example);

class ExampleRows final : public Rows {
 public:
  // Each example has a target and at most context + 1 tokens. Packed: the longest first, each into the row that it
  // fills best.
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
  // The tokens of the first example before its first target.
  std::vector<int32_t> prompt() const;
  // The targets of all rows, one after another.
  std::vector<int32_t> target_tokens() const;
  uint64_t checksum() const;

 private:
  void load_row(int64_t row, int32_t* inputs, int32_t* targets) const override;
  void row_starts(int64_t row, int32_t* out) const override;
  // Calls f(example, where in the row it begins) for each of a row, and gives where the last one ends.
  template <class F>
  int64_t walk(int64_t row, const F& f) const;

  int64_t context_;
  bool packed_;
  std::vector<int32_t> tokens_;     // tokens of all examples
  std::vector<uint8_t> trained_;    // whether each token is trained
  std::vector<int64_t> begins_{0};  // the beginning of each example, and the end of the last
  std::vector<int64_t> members_;    // examples, row by row
  std::vector<int64_t> row_ends_;   // in members_
  std::vector<int64_t> row_targets_;
  int64_t targets_ = 0, bytes_ = 0;
};

struct ExampleOptions {
  ChatTemplate style = ChatTemplate::automatic;
  bool responses_only = true;
  bool packed = false;
  bool skip_bad = false;
  HeldOut held = {};
  bool ends = true;      // what the tokenizer itself puts before and behind a text is there
  bool special = false;  // names of special tokens in a message are these tokens
  RowNames names = {};   // other names of a row's keys and roles
  int64_t context = 0;
  int64_t vocab = 0;  // tokens in the model's table; 0: all that the tokenizer has
  // Bytes of rows for which memory suffices: a row takes about 16 times its size while it is read.
  int64_t most_bytes = std::numeric_limits<int64_t>::max();
};

// A question to a model: its tokens as far as the next turn of a conversation, and the end of the answer: a token, or a
// text where the tokenizer has no such token; of no turns the end of any answer alone. Throws Error (usage) naming the
// field `template` where `automatic` finds no template of the model's own, and InputError.
struct Asked {
  std::vector<int32_t> tokens = {}, ends = {};
  std::vector<std::string> stops = {};
};
Asked ask(const std::vector<Message>& turns, const ExampleOptions& options, const Tokenizer& tokenizer);

// The examples of the files that `spec` names (example_files()): the last tenth of their rows, at least one, are for
// validation, or what `held` or a folder says. Throws InputError naming file and line of the first that cannot be
// trained on, unless these are to be skipped; Dataset::notes says how many were, how many were cut at the context,
// which markers the tokenizer does not have, and which keys nothing reads. A row that begins with text, and not with a
// template's marker, has the tokenizer's own beginning before it. An automatic template is for messages the tokenizer's
// own, where it has one.
Dataset load_examples(const std::filesystem::path& spec, const TokenizerChoice& tokenizer,
                      const ExampleOptions& options);

// All of them, none held out, as tokens of a tokenizer that is there; of a folder those for validation, if it has some.
std::shared_ptr<const ExampleRows> all_examples(const std::filesystem::path& spec, const Tokenizer& tokenizer,
                                                const ExampleOptions& options, std::vector<std::string>& notes);

// Texts or examples that a model is evaluated on, as tokens of its own tokenizer.

struct EvaluationText {
  std::shared_ptr<const Rows> rows;
  int64_t bytes = 0;                    // of the text; for examples of their targets' text
  std::vector<std::string> notes = {};  // notes about it for a user
};

// A text file (compressed too), llm.c's token file, the one for validation of several, a folder that `tessera data`
// made (its part for validation), or a file of examples. A text is one sequence of tokens with the tokenizer's own
// beginning and end, special names in it being text, in consecutive windows of options.context: each token but the
// first is predicted once. Throws InputError; Error (usage) for a folder of another tokenizer.
EvaluationText evaluation_text(const std::string& spec, const Tokenizer& tokenizer, const ExampleOptions& options);

}  // namespace tessera
