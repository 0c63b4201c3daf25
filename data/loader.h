// A counted shuffle: where each of n things stands is a pure function of (key, round, place), so nothing is kept or
// carried, and any rank can ask for any place of any round.
#pragma once
#include <algorithm>
#include <bit>
#include <cstdint>
#include <vector>

#include "data/token_file.h"
#include "tensor/random.h"

namespace tessera {

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
  // How many targets of all rows are not kIgnored; at least 1.
  virtual int64_t targets() const = 0;
  // Rows [first, first + count) of [0, count()): `inputs` and `targets` are (count, context). Throws Error (usage).
  virtual void load(int64_t first, int64_t count, int32_t* inputs, int32_t* targets) const = 0;
  // Whether the rows themselves say where documents begin, and then: for each token of some rows, (count, context), the
  // place in its row where its document begins.
  virtual bool has_starts() const { return false; }
  virtual void starts(int64_t /*first*/, int64_t /*count*/, int32_t* /*out*/) const {}
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

  // Where sequence s of [0, batch) of a step starts in the split.
  int64_t start(int64_t step, int64_t sequence) const;
  // Sequences [first, first + count) of a step: token ids to `inputs` and the tokens after them to `targets`, both
  // (count, context). Throws Error (usage) when they are not sequences of the batch.
  void load(int64_t step, int64_t first, int64_t count, int32_t* inputs, int32_t* targets) const;

  int64_t batch() const { return batch_; }
  int64_t context() const { return context_; }

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
  void load(int64_t first, int64_t count, int32_t* inputs, int32_t* targets) const override;

 private:
  std::vector<TokenFile> files_;
  int64_t context_;
  std::vector<int64_t> ends_;  // ends of each file's windows
};

// Consecutive windows that cover a whole split: every token but the first is a target exactly once. The last window is
// filled with input 0 and target kIgnored, so that a mean over the targets is the mean over the split.
class Windows final : public Rows {
 public:
  // Keeps a reference to `tokens`. Throws Error (usage) for a context below 1 or a split of fewer than two tokens.
  Windows(const TokenFile& tokens, int64_t context);

  int64_t context() const override { return context_; }
  int64_t count() const override { return (targets() + context_ - 1) / context_; }
  int64_t targets() const override { return tokens_.size() - 1; }
  void load(int64_t first, int64_t count, int32_t* inputs, int32_t* targets) const override;

 private:
  const TokenFile& tokens_;
  int64_t context_;
};

}  // namespace tessera
