// Writing text: one token after another, with cached keys and values.
#pragma once

#include "models/language_model.h"

namespace tessera {

struct SampleOptions {
  // In the order in which they are applied, behind the penalty.
  double temperature = 1;  // 0 takes the likeliest token
  int64_t top_k = 0;       // only among the k likeliest; 0: all
  double top_p = 1;  // only among the fewest likeliest that together reach this probability (Holtzman et al. 2020)
  double min_p = 0;  // only among those of at least this share of the likeliest's probability (Nguyen et al. 2024)
  // Divides the score of a token that was read or written before, once however often (Keskar et al. 2019, section 4.1).
  double repetition_penalty = 1;
  uint64_t seed = 0;
  int64_t vocab = 0;  // tokens from here on are padding and never drawn; 0: the model's whole vocabulary
};

// One draw from logits (V) behind the tokens `before`, the `index`-th of the stream: a pure function of its arguments.
int32_t draw_token(const Tensor& logits, const SampleOptions& options, uint64_t index,
                   std::span<const int32_t> before = {});

// A text that grows: the tokens that the model must read next, and the token behind them. When the context is full, the
// last half of it is read again, and writing continues from there.
class DecodingState {
 public:
  // The prompt has at least one token. The `number` tells its draws from those of other texts.
  DecodingState(const LanguageModel& model, std::vector<int32_t> prompt, int64_t count, uint64_t number = 0);

  std::span<const int32_t> unread();  // at least one; empties the cache where there is no room for them
  TextCache& cache() { return cache_; }
  // After unread() was read: draws the next token.
  int32_t grow(const Tensor& logits, const SampleOptions& options);
  void grow(int32_t token);
  int64_t written() const { return std::ssize(tokens_) - prompt_; }

 private:
  size_t context_;
  std::vector<int32_t> tokens_;
  int64_t prompt_;
  size_t from_ = 0;
  uint64_t number_;
  TextCache cache_;
};

// Calls f with each of `count` tokens that follow the prompt (not empty); stops early when f returns false.
void sample(LanguageModel& model, const std::vector<int32_t>& prompt, int64_t count, const SampleOptions& options,
            const std::function<bool(int32_t)>& f);

}  // namespace tessera
