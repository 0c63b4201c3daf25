// Tokens from a file, and tokens from nothing.
#include "app/sequences.h"

#include <memory>

#include "data/loader.h"
#include "tensor/random.h"

namespace tessera {

Sequences sequences_of(const Dataset& dataset, int64_t context, int64_t batch, uint64_t seed) {
  const auto loader = std::make_shared<Loader>(dataset.train, context, batch, seed);
  return {dataset.tokenizer->vocab_size(),
          [loader](int64_t step, int64_t first, int64_t count, int32_t* inputs, int32_t* targets) {
            loader->load(step, first, count, inputs, targets);
          }};
}

Sequences counted_sequences(int64_t vocab, int64_t context, int64_t batch, uint64_t seed) {
  const Philox random = Philox::named(seed, "counted sequences");
  return {
      vocab, [=](int64_t step, int64_t first, int64_t count, int32_t* inputs, int32_t* targets) {
        for (int64_t s = 0; s < count; ++s) {
          const auto token = [&, base = (step * batch + first + s) * (context + 1)](int64_t t) {
            return static_cast<int32_t>(random.below(static_cast<uint64_t>(vocab), static_cast<uint64_t>(base + t)));
          };
          for (int64_t t = 0; t < context; ++t) {
            inputs[s * context + t] = token(t);
            targets[s * context + t] = token(t + 1);
          }
        }
      }};
}

}  // namespace tessera
