// Learning the merges of a byte-level BPE tokenizer from a text.
#pragma once
#include <cstdint>
#include <functional>
#include <string_view>

#include "data/bpe/bpe_tokenizer.h"

namespace tessera {

struct BpeTraining {
  int64_t vocab_size = 50257;  // GPT-2's; at least 256
  int64_t least_count = 2;     // of a pair that is worth a token: a small text ends with fewer than vocab_size
  // Called now and then with the tokens made so far.
  std::function<void(int64_t made)> progress = nullptr;
};

// Begins with the 256 bytes, and again and again joins the pair of tokens that stands side by side most often in the
// pieces of the text (the pair with the smaller numbers among equals) until the vocabulary is full or no pair is
// frequent enough. Source: Sennrich et al. 2016, algorithm 1. Cost: one pass over the text; then each merge costs only
// the distinct pieces that contain it.
BpeTokenizer train_bpe(std::string_view text, const BpeTraining& options);

}  // namespace tessera
