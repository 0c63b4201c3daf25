// Counted random tokens of which some targets are ignored, as examples have them, and rows of several documents.
#pragma once

#include "train/batches.h"

namespace tessera::test {

// Each sequence ignores its targets before a place of its own, which may be the last: ranks and micro-batches have very
// different numbers of them. `packed`: documents of 1 to 6 tokens that no token ends.
inline Sequences masked_sequences(const Job& job, bool packed = false) {
  const int64_t context = job.model.context, batch = job.optim.batch;
  const Philox random = Philox::named(5, "masks");
  const auto kept = [=](int64_t step, int64_t s) {  // targets, 1 to context, most often few
    const auto at = static_cast<uint64_t>(step * batch + s);
    return 1 + random.below(static_cast<uint64_t>(random.below(3, at) == 0 ? context : 2), at, 1);
  };
  Sequences made = counted_sequences(job.model.vocab, context, batch, static_cast<uint64_t>(job.optim.seed));
  made.load = [=, load = std::move(made.load)](int64_t step, int64_t first, int64_t count, int32_t* in, int32_t* out) {
    load(step, first, count, in, out);
    for (int64_t s = 0; s < count; ++s)
      for (int64_t t = 0; t < context - static_cast<int64_t>(kept(step, first + s)); ++t)
        out[s * context + t] = Rows::kIgnored;
  };
  made.trained = [=](int64_t step) {
    int64_t sum = 0;
    for (int64_t s = 0; s < batch; ++s) sum += static_cast<int64_t>(kept(step, s));
    return sum;
  };
  if (!packed) return made;
  made.document_end.reset();
  made.starts = [=](int64_t step, int64_t first, int64_t count, int32_t* starts) {
    for (int64_t s = 0; s < count; ++s) {
      const auto at = static_cast<uint64_t>(step * batch + first + s);
      int64_t start = 0;
      for (int64_t t = 0, end = 0; t < context; ++t) {
        if (t == end) start = t, end += 1 + static_cast<int64_t>(random.below(6, at, 2 + static_cast<uint64_t>(t)));
        starts[s * context + t] = static_cast<int32_t>(start);
      }
    }
  };
  return made;
}

}  // namespace tessera::test
