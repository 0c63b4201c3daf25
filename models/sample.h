// Writing text: one token after another, with cached keys and values.
#pragma once
#include <cstdint>
#include <functional>
#include <vector>

#include "models/language_model.h"

namespace tessera {

struct SampleOptions {
  double temperature = 1;  // 0 takes the likeliest token
  int64_t top_k = 0;       // only among the k likeliest; 0: all
  double top_p = 1;  // only among the fewest likeliest that together reach this probability (Holtzman et al. 2020)
  uint64_t seed = 0;
  int64_t vocab = 0;  // tokens from here on are padding and never drawn; 0: the model's whole vocabulary
};

// One draw from logits (V), the `index`-th of the stream: a pure function of its arguments.
int32_t draw_token(const Tensor& logits, const SampleOptions& options, uint64_t index);

// Calls f with each of `count` tokens that follow the prompt (not empty); stops early when f returns false. When the
// context is full, the last half of it is read again and writing goes on from there.
void sample(LanguageModel& model, const std::vector<int32_t>& prompt, int64_t count, const SampleOptions& options,
            const std::function<bool(int32_t)>& f);

}  // namespace tessera
