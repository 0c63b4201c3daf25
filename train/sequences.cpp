// Tokens from a file, and tokens from nothing.
#include "train/sequences.h"

#include <memory>

#include "data/examples.h"
#include "data/loader.h"
#include "data/permutation.h"
#include "tensor/field_error.h"
#include "tensor/random.h"

namespace tessera {
namespace {
constexpr uint64_t kNoise = 4;  // one token in so many is random

// Sequence s of step k is row number k * batch + s of an endless list of epochs.
Sequences sequences_of_rows(const std::shared_ptr<const ExampleRows>& rows, int64_t vocab, int64_t batch,
                            uint64_t seed) {
  const Philox random = Philox::named(seed, "order of examples");
  const auto row = [rows, batch, random](int64_t step, int64_t sequence) {
    const auto at = static_cast<uint64_t>(step * batch + sequence), count = static_cast<uint64_t>(rows->count());
    return static_cast<int64_t>(permuted(random, at / count, count, at % count));
  };
  Sequences made{vocab, [=](int64_t step, int64_t first, int64_t count, int32_t* inputs, int32_t* targets) {
                   for (int64_t s = 0; s < count; ++s)
                     rows->load(row(step, first + s), 1, inputs + s * rows->context(), targets + s * rows->context());
                 }};
  made.trained = [=](int64_t step) {
    int64_t sum = 0;
    for (int64_t s = 0; s < batch; ++s) sum += rows->targets_of(row(step, s));
    return sum;
  };
  if (rows->has_starts())
    made.starts = [=](int64_t step, int64_t first, int64_t count, int32_t* starts) {
      for (int64_t s = 0; s < count; ++s) rows->starts(row(step, first + s), 1, starts + s * rows->context());
    };
  return made;
}
}  // namespace

int32_t document_end_of(const Sequences& sequences) {
  if (!sequences.document_end)
    throw FieldError("document_mask",
                     "the tokenizer has no token that ends documents; expected tokens with <|endoftext|>, as llm.c's "
                     "files have");
  return *sequences.document_end;
}

void check_sequences(const Job& job, const Sequences& sequences) {
  if (job.optim.document_mask && !sequences.starts) document_end_of(sequences);
  if (sequences.trained && job.plan.dp_mode == DataMode::ps_async)
    throw FieldError("dp_mode",
                     "the loss is a mean over the trained targets of a whole batch, and the updates of ps-async are of "
                     "single workers; expected ddp, dataparallel or ps-sync");
}

int64_t targets_of_step(const Sequences& sequences, int64_t step, int64_t all) {
  return sequences.trained ? sequences.trained(step) : all;
}

Sequences sequences_of(const Dataset& dataset, int64_t context, int64_t batch, uint64_t seed) {
  if (dataset.train_examples)
    return sequences_of_rows(dataset.train_examples, dataset.tokenizer->vocab_size(), batch, seed);
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
