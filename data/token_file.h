// Token files, and batches and rows of tokens. A 64-byte header precedes little-endian tokens of 16 or 32 bits.
//
//   bytes 0..7 "TESSTOK\n"   8..11 version (1)   12..15 bytes per token (2 or 4)   16..23 vocabulary
//   24..31 count             32..39 XXH3-64 of the tokens' bytes                   40..63 zero
#pragma once
#include <algorithm>
#include <bit>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/files.h"
#include "tensor/random.h"

namespace tessera {

class TokenFile {
 public:
  // Validates header, length, checksum and token range. The file stays open. Throws InputError. Cost: two passes.
  static TokenFile open(const std::filesystem::path& file);
  // Reads in place and validates as open() does, except the checksum, which llm.c's format lacks.
  static TokenFile open_llmc(const std::filesystem::path& file, int64_t vocab_size);
  // The bytes must outlive the result.
  static TokenFile of_bytes(std::span<const std::byte> bytes, const std::string& what);
  static TokenFile of_llmc_bytes(std::span<const std::byte> bytes, int64_t vocab_size, const std::string& what);
  // Copies the tokens.
  static TokenFile of_tokens(std::span<const int32_t> tokens, int64_t vocab_size, const std::string& what);
  // Writes atomically. Throws OutputError; Error for a token outside [0, vocab_size).
  static void write(const std::filesystem::path& file, std::span<const int32_t> tokens, int64_t vocab_size);

  const std::string& name() const { return what_; }
  int64_t size() const { return count_; }
  int64_t vocab_size() const { return vocab_; }
  uint64_t checksum() const { return checksum_; }  // XXH3-64 of the tokens' bytes
  int32_t operator[](int64_t i) const;
  // Throws InputError if the file was modified and no longer contains valid tokens there.
  void copy(int64_t begin, int64_t count, int32_t* out) const;
  // Calls f with successive chunks. Throws like copy().
  using Each = std::function<void(std::span<const int32_t> tokens)>;
  void chunks(int64_t begin, int64_t end, const Each& f) const;

 private:
  static TokenFile checked(const std::string& what, std::shared_ptr<const OpenFile> file,
                           std::span<const std::byte> bytes, std::optional<int64_t> vocab_of_llmc = {});
  // Return the checksum, if the format has one.
  std::optional<uint64_t> read_header(int64_t size);
  std::optional<uint64_t> read_llmc_header(int64_t size);
  void read(int64_t at, std::span<std::byte> out) const;
  void widen(std::span<const std::byte> from, int64_t position, int32_t* out) const;
  template <class F>
  void for_each_chunk(int64_t begin, int64_t count, const F& f) const;

  std::string what_;
  std::shared_ptr<const OpenFile> file_;  // or `owned_`
  std::shared_ptr<const std::string> owned_;
  std::span<const std::byte> bytes_;
  int64_t count_ = 0;
  int64_t vocab_ = 0;
  uint64_t checksum_ = 0;
  int64_t begin_ = 0, width_ = 2;  // offset of the tokens and width of a token, in bytes
};

// Writes incrementally; the file is valid after finish().
class TokenWriter {
 public:
  // The file must not exist. All functions throw OutputError.
  TokenWriter(const std::filesystem::path& file, int64_t vocab_size);
  // Throws Error for a token outside [0, vocab_size).
  void add(std::span<const int32_t> tokens);
  int64_t count() const { return count_; }
  void finish();

 private:
  void write();

  int64_t vocab_, count_ = 0, end_ = 0;  // tokens and bytes written
  std::string waiting_ = {};
  Checksum sum_ = {};
  SharedFile file_;
};

// llm.c token files: 256 little-endian int32 (magic, version, count, zeros), then the tokens.
//
// Magic 20240520 with version 1 has 16 bits per token (GPT-2), 20240801 with version 7 has 32 (Llama 3). Source: llm.c,
// dev/data/data_common.py. The format contains neither a tokenizer nor a checksum.

// False also if the file cannot be read.
bool is_llmc_file(const std::filesystem::path& file);

// A shuffle that is a pure function of (key, round, position), so there is no state to store or communicate.

// The permutation of [0, count) in round `round`, for count up to 2^62. A Feistel network over the next even power of
// two, iterated until the result is in range (cycle walking; Black and Rogaway 2002, "Ciphers with arbitrary finite
// domains"): about two iterations.
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

// Rows of equal length with a target per token.

class Rows {
 public:
  static constexpr int32_t kIgnored = -1;  // target excluded from the loss

  virtual ~Rows() = default;
  virtual int64_t context() const = 0;  // tokens per row
  virtual int64_t count() const = 0;
  // Length without padding, at least 1. Padding is at the end and has no targets.
  virtual int64_t length(int64_t /*row*/) const { return context(); }
  virtual bool is_padded() const { return false; }  // lengths may be below the context
  // Targets other than kIgnored in all rows, at least 1.
  virtual int64_t targets() const = 0;
  // `inputs` and `targets` are (count, context). Throws Error (usage) if rows are out of range.
  void load(int64_t first, int64_t count, int32_t* inputs, int32_t* targets) const;
  // Whether rows define document boundaries. If so, starts() returns (count, context): for each token, the position in
  // its row where its document begins.
  virtual bool has_starts() const { return false; }
  void starts(int64_t first, int64_t count, int32_t* out) const {
    for (int64_t r = 0; r < count; ++r) row_starts(first + r, out + r * context());
  }

 private:
  virtual void load_row(int64_t row, int32_t* inputs, int32_t* targets) const = 0;
  virtual void row_starts(int64_t /*row*/, int32_t* /*out*/) const {}
};

// The training order is a pure function of (seed, step): sequence s of step k starts at a position sampled from
// Philox::named(seed, "data order") at index k * batch + s. A run can therefore resume at any step, and any rank can
// load its slice of a step under any partition of the batch.

class Loader {
 public:
  // `tokens` must outlive the loader. Throws Error (usage) for sizes below 1 and a context not shorter than the split.
  Loader(const TokenFile& tokens, int64_t context, int64_t batch, uint64_t seed);

  int64_t start(int64_t step, int64_t sequence) const;
  // Loads tokens and their successors, both (count, context). Throws Error (usage) for sequences outside the batch.
  void load(int64_t step, int64_t first, int64_t count, int32_t* inputs, int32_t* targets) const;

 private:
  const TokenFile& tokens_;
  int64_t context_, batch_;
  Philox order_;
};

// Disjoint windows, each visited once per epoch: `context` tokens and the following token, as many as fit in each file.
// The remainder of a file is skipped.
class TrainingWindows final : public Rows {
 public:
  // Throws Error (usage) for a context below 1, InputError for a file shorter than one window.
  TrainingWindows(std::vector<TokenFile> files, int64_t context);

  int64_t context() const override { return context_; }
  int64_t count() const override { return ends_.back(); }
  int64_t targets() const override { return count() * context_; }

 private:
  void load_row(int64_t row, int32_t* inputs, int32_t* targets) const override;
  std::vector<TokenFile> files_;
  int64_t context_;
  std::vector<int64_t> ends_;  // cumulative windows per file
};

// Every token of a split except the first is a target exactly once. The last window is padded with input 0 and target
// kIgnored, so that the mean over targets is the mean over the split.
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
