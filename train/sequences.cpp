// Tokens from a file, and tokens from nothing.
#include "train/sequences.h"

#include <memory>

#include "data/loader.h"
#include "tensor/field_error.h"
#include "tensor/random.h"

namespace tessera {
namespace {
constexpr uint64_t kNoise = 4;  // one token in so many is random
}

int32_t document_end_of(const Sequences& sequences) {
  if (!sequences.document_end)
    throw FieldError("document_mask",
                     "the tokenizer has no token that ends documents; expected tokens with <|endoftext|>, as llm.c's "
                     "files have");
  return *sequences.document_end;
}

Sequences sequences_of(const Dataset& dataset, int64_t context, int64_t batch, uint64_t seed) {
  const auto loader = std::make_shared<Loader>(dataset.train, context, batch, seed);
  return {dataset.tokenizer->vocab_size(),
          [loader](int64_t step, int64_t first, int64_t count, int32_t* inputs, int32_t* targets) {
            loader->load(step, first, count, inputs, targets);
          },
          dataset.tokenizer->document_end()};
}

Sequences counted_sequences(int64_t vocab, int64_t context, int64_t batch, uint64_t seed) {
  const Philox random = Philox::named(seed, "counted sequences");
  const auto v = static_cast<uint64_t>(vocab);
  return {vocab,
          [=](int64_t step, int64_t first, int64_t count, int32_t* inputs, int32_t* targets) {
            for (int64_t s = 0; s < count; ++s) {
              const auto base = static_cast<uint64_t>((step * batch + first + s) * (context + 1));
              auto token = static_cast<uint64_t>(random.below(v, 2 * base));
              for (int64_t t = 0; t < context; ++t) {
                const uint64_t at = 2 * (base + static_cast<uint64_t>(t) + 1);
                inputs[s * context + t] = static_cast<int32_t>(token);
                token = random.below(kNoise, at + 1) == 0 ? random.below(v, at) : (5 * token + 3) % v;
                targets[s * context + t] = static_cast<int32_t>(token);
              }
            }
          },
          0};
}

}  // namespace tessera
