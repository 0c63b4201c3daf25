// Text generation with KV caches.
#pragma once
#include <array>
#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "models/language_model.h"

namespace tessera {

struct SampleOptions {
  // Applied in this order, after the penalty.
  double temperature = 1;  // 0: greedy
  int64_t top_k = 0;       // 0: unlimited
  double top_p = 1;        // nucleus sampling (Holtzman et al. 2020)
  double min_p = 0;        // minimum probability relative to the likeliest token (Nguyen et al. 2024)
  // Penalizes each token that already occurred, once per token (Keskar et al. 2019, section 4.1).
  double repetition_penalty = 1;
  uint64_t seed = 0;
  int64_t vocab = 0;  // higher tokens are padding and never sampled; 0: the model's vocabulary
};

// Samples from logits (V) after the tokens `before`, at position `index` of the RNG stream; a pure function of its
// arguments.
int32_t sample_token(const Tensor& logits, const SampleOptions& options, uint64_t index,
                     std::span<const int32_t> before = {});

// A text being generated. When the context is full, its last half is reprocessed in an empty cache.
class DecodingState {
 public:
  // `number` selects the text's RNG stream.
  DecodingState(const LanguageModel& model, std::vector<int32_t> prompt, int64_t count, uint64_t number = 0);

  std::span<const int32_t> unread();  // tokens not yet processed, at least one; clears a full cache
  TextCache& cache() { return cache_; }
  // Samples the next token after the caller has read unread().
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

// The prompt must not be empty; stops if f returns false.
void sample(LanguageModel& model, const std::vector<int32_t>& prompt, int64_t count, const SampleOptions& options,
            const std::function<bool(int32_t)>& f);

}  // namespace tessera
