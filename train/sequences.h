// Where the sequences of a training step come from.
#pragma once
#include <cstdint>
#include <functional>
#include <optional>

#include "data/dataset.h"

namespace tessera {

struct Sequences {
  int64_t vocab = 0;
  // Sequences [first, first + count) of a step: `inputs` and the tokens after them, `targets`, both (count, context).
  std::function<void(int64_t step, int64_t first, int64_t count, int32_t* inputs, int32_t* targets)> load;
  std::optional<int32_t> document_end = {};  // the token that ends documents, where there is one
};

// That token, for a run that masks documents. Throws FieldError where there is none.
int32_t document_end_of(const Sequences& sequences);

// Of the training split, which must outlive the result.
Sequences sequences_of(const Dataset& dataset, int64_t context, int64_t batch, uint64_t seed);

// Counted random tokens in [0, vocab), most of which follow from the one before, so that there is something to learn.
// Any rank can make any sequence, and no file is needed. Token 0 ends documents.
Sequences counted_sequences(int64_t vocab, int64_t context, int64_t batch, uint64_t seed);

}  // namespace tessera
