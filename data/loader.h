// Batches and rows of tokens.
#pragma once
#include <algorithm>
#include <bit>
#include <cstdint>
#include <vector>

#include "data/token_file.h"
#include "tensor/random.h"

namespace tessera {

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
