// Tokens in files, and batches and rows of them. A file of tokens is a 64-byte header and then the tokens as 16 or 32
// bits each, little-endian.
//
//   bytes 0..7 "TESSTOK\n"   8..11 version (1)   12..15 bytes per token (2 or 4)   16..23 vocabulary
//   24..31 count             32..39 XXH3-64 of the tokens' bytes                   40..63 zero
#pragma once
#include <algorithm>
#include <bit>

#include "data/files.h"
#include "tensor/random.h"

namespace tessera {

class TokenFile {
 public:
  // Checks all of the file: header, length, checksum, every token inside the vocabulary. It stays open. Throws
  // InputError. Cost: two passes over the file.
  static TokenFile open(const std::filesystem::path& file);
  // llm.c's token file, read where it lies. It holds no checksum, so only what open() says of length and tokens is
  // checked.
  static TokenFile open_llmc(const std::filesystem::path& file, int64_t vocab_size);
  // Checks bytes in memory as these do files; they must outlive the result, and `what` names them.
  static TokenFile of_bytes(std::span<const std::byte> bytes, const std::string& what);
  static TokenFile of_llmc_bytes(std::span<const std::byte> bytes, int64_t vocab_size, const std::string& what);
  // Holds tokens that are in no file.
  static TokenFile of_tokens(std::span<const int32_t> tokens, int64_t vocab_size, const std::string& what);
  // Writes tokens, each in [0, vocab_size), beside `file` and renames. Throws OutputError; Error for a bad token.
  static void write(const std::filesystem::path& file, std::span<const int32_t> tokens, int64_t vocab_size);

  const std::string& name() const { return what_; }
  int64_t size() const { return count_; }
  int64_t vocab_size() const { return vocab_; }
  uint64_t checksum() const { return checksum_; }  // XXH3-64 of the tokens' bytes
  // Token i of [0, size()).
  int32_t operator[](int64_t i) const;
  // Tokens [begin, begin + count) to `out`. The caller keeps them inside [0, size()). Throws InputError when the file
  // was changed so that they are not there, or are outside the vocabulary.
  void copy(int64_t begin, int64_t count, int32_t* out) const;
  // Calls f for the tokens [begin, end), in order, many at once. Throws as copy() does.
  using Each = std::function<void(std::span<const int32_t> tokens)>;
  void pieces(int64_t begin, int64_t end, const Each& f) const;

 private:
  // An open file, or bytes in memory.
  static TokenFile checked(const std::string& what, std::shared_ptr<const OpenFile> file,
                           std::span<const std::byte> bytes, std::optional<int64_t> vocab_of_llmc = {});
  // What a header says is noted, and a hash that it may have is returned.
  std::optional<uint64_t> read_header(int64_t size);
  std::optional<uint64_t> read_llmc_header(int64_t size);
  void read(int64_t at, std::span<std::byte> out) const;
  void widen(std::span<const std::byte> from, int64_t position, int32_t* out) const;
  template <class F>
  void for_each_piece(int64_t begin, int64_t count, const F& f) const;

  std::string what_;
  std::shared_ptr<const OpenFile> file_;  // or
  std::shared_ptr<const std::string> owned_;
  std::span<const std::byte> bytes_;
  int64_t count_ = 0;
  int64_t vocab_ = 0;
  uint64_t checksum_ = 0;
  int64_t begin_ = 0, width_ = 2;  // bytes: where the tokens begin, and of each
};

// A file that is written as its tokens come, and is one for TokenFile::open() when finish() has returned.
class TokenWriter {
 public:
  // The file must not be there yet. Everything throws OutputError.
  TokenWriter(const std::filesystem::path& file, int64_t vocab_size);
  // Throws Error for a token that is not in [0, vocab_size).
  void add(std::span<const int32_t> tokens);
  int64_t count() const { return count_; }
  void finish();

 private:
  void write();

  int64_t vocab_, count_ = 0, end_ = 0;  // tokens, and bytes that are written
  std::string waiting_ = {};
  Checksum sum_ = {};
  SharedFile file_;
};

// Token files of llm.c: a header of 256 little-endian int32 (magic, version, count, then zeros) and the tokens.
//
// Magic 20240520 with version 1 holds 16 bits a token (GPT-2), 20240801 with version 7 holds 32 (Llama 3). The format
// is llm.c's (dev/data/data_common.py); there is no tokenizer and no checksum in it.

// Whether a file begins as one of these does. False for what cannot be read.
bool is_llmc_file(const std::filesystem::path& file);

// --- a counted shuffle: where each of n things stands is a pure function of (key, round, place), so nothing is kept or
// carried, and any rank can ask for any place of any round ---

// The number at `place` of [0, count) in round `round`; in each round every number of [0, count) stands somewhere. A
// Feistel network over the next even power of two, walked until it comes back into range (Black and Rogaway 2002,
// "Ciphers with arbitrary finite domains"): about two walks. count is at most 2^62.
constexpr uint64_t permuted(const Philox& random, uint64_t round, uint64_t count, uint64_t place) {
  constexpr int kRounds = 8;
  const auto half = std::max<int64_t>((static_cast<int64_t>(std::bit_width(count - 1)) + 1) / 2, 1);
  const uint64_t mask = (uint64_t{1} << half) - 1;
  do {
    uint64_t left = place >> half, right = place & mask;
    for (uint64_t r = 0; r < kRounds; ++r) {
      const uint64_t next = left ^ (random(r << 32 | right, round)[0] & mask);
      left = right;
      right = next;
    }
    place = left << half | right;
  } while (place >= count);
  return place;
}

// Rows of tokens of one length, with a target for each token: what validation walks through, and fine-tuning draws
// from.

class Rows {
 public:
  static constexpr int32_t kIgnored = -1;  // a target that is not trained and does not count

  virtual ~Rows() = default;
  virtual int64_t context() const = 0;  // tokens of a row
  virtual int64_t count() const = 0;
  // Tokens of a row before its padding, at least 1. Padding is at the end, and none of its targets is trained.
  virtual int64_t length(int64_t /*row*/) const { return context(); }
  virtual bool is_padded() const { return false; }  // whether a length may be below the context
  // How many targets of all rows are not kIgnored; at least 1.
  virtual int64_t targets() const = 0;
  // Rows [first, first + count) of [0, count()): `inputs` and `targets` are (count, context). Throws Error (usage).
  void load(int64_t first, int64_t count, int32_t* inputs, int32_t* targets) const;
  // Whether the rows themselves say where documents begin, and then: for each token of some rows, (count, context), the
  // place in its row where its document begins.
  virtual bool has_starts() const { return false; }
  void starts(int64_t first, int64_t count, int32_t* out) const {
    for (int64_t r = 0; r < count; ++r) row_starts(first + r, out + r * context());
  }

 private:
  virtual void load_row(int64_t row, int32_t* inputs, int32_t* targets) const = 0;
  virtual void row_starts(int64_t /*row*/, int32_t* /*out*/) const {}
};

// Batches for training and windows for validation.
//
// The order of training is a pure function of (seed, step): sequence s of step k starts at a position drawn by
// Philox::named(seed, "data order") at index k * batch + s. So a run can be resumed at any step, and any rank can load
// its own slice of a step, under any split of the batch.

class Loader {
 public:
  // Keeps a reference to `tokens`. Throws Error (usage) for sizes below 1 and for a context (in tokens) that leaves no
  // room for a next token.
  Loader(const TokenFile& tokens, int64_t context, int64_t batch, uint64_t seed);

  // The first token of sequence s of [0, batch) of a step, counted in the split.
  int64_t start(int64_t step, int64_t sequence) const;
  // Sequences [first, first + count) of a step: token ids to `inputs` and the tokens after them to `targets`, both
  // (count, context). Throws Error (usage) when they are not sequences of the batch.
  void load(int64_t step, int64_t first, int64_t count, int32_t* inputs, int32_t* targets) const;

 private:
  const TokenFile& tokens_;
  int64_t context_, batch_;
  Philox order_;
};

// Windows to train on once in an epoch: of each of several files, one after another, as many windows of `context`
// tokens, each with the token that follows it, as there are; what is left at the end of a file fills none and is passed
// over.
class TrainingWindows final : public Rows {
 public:
  // Throws Error (usage) for a context below 1, and InputError for a file in which there is no window.
  TrainingWindows(std::vector<TokenFile> files, int64_t context);

  int64_t context() const override { return context_; }
  int64_t count() const override { return ends_.back(); }
  int64_t targets() const override { return count() * context_; }

 private:
  void load_row(int64_t row, int32_t* inputs, int32_t* targets) const override;
  std::vector<TokenFile> files_;
  int64_t context_;
  std::vector<int64_t> ends_;  // ends of each file's windows
};

// Consecutive windows that cover a whole split: every token but the first is a target exactly once. The last window is
// filled with input 0 and target kIgnored, so that a mean over the targets is the mean over the split.
class Windows final : public Rows {
 public:
  // Throws Error (usage) for a context below 1 or a split of fewer than two tokens.
  Windows(TokenFile tokens, int64_t context);

  int64_t context() const override { return context_; }
  int64_t count() const override { return (targets() + context_ - 1) / context_; }
  int64_t targets() const override { return tokens_.size() - 1; }

 private:
  void load_row(int64_t row, int32_t* inputs, int32_t* targets) const override;
  TokenFile tokens_;
  int64_t context_;
};

}  // namespace tessera
