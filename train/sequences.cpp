// Tokens from a file, and tokens from nothing.
#include "train/sequences.h"

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "data/examples.h"
#include "data/loader.h"
#include "data/mixture.h"
#include "tensor/error.h"
#include "tensor/random.h"

namespace tessera {
namespace {
constexpr uint64_t kNoise = 4;  // one token in so many is random

// Rows in an endless list of epochs, each of which has all of them in an order of its own.
struct Epochs {
  std::shared_ptr<const Rows> rows;
  std::shared_ptr<const ExampleRows> examples;  // where they are examples: the same
  Philox order;

  int64_t row(int64_t nth) const {
    const auto at = static_cast<uint64_t>(nth), count = static_cast<uint64_t>(rows->count());
    return static_cast<int64_t>(permuted(order, at / count, count, at % count));
  }
};

// Epochs of the rows that are trained on: examples; windows of token files.
Epochs epochs_of(const Dataset& dataset, int64_t context, uint64_t seed, size_t number) {
  const std::string which = number > 0 ? " " + std::to_string(number) : "";
  if (dataset.train_examples)
    return {dataset.train_examples, dataset.train_examples, Philox::named(seed, "order of examples" + which)};
  return {std::make_shared<TrainingWindows>(dataset.train, context), nullptr,
          Philox::named(seed, "order of windows" + which)};
}

// Sequence s of step k is number k * batch + s of an endless list, which MixtureOrder deals to the sources.
class EpochSequences {
 public:
  EpochSequences(std::vector<Epochs> sources, std::vector<int64_t> shares, int64_t batch)
      : sources_(std::move(sources)), order_(std::move(shares)), batch_(batch) {}

  // Calls f(source, row) for sequence s of a step.
  template <class F>
  void at(int64_t step, int64_t sequence, const F& f) const {
    const auto [source, nth] = order_.at(step * batch_ + sequence);
    f(sources_[source], sources_[source].row(nth));
  }
  int64_t trained(int64_t step) const {
    int64_t sum = 0;
    for (int64_t s = 0; s < batch_; ++s)
      at(step, s, [&](const Epochs& e, int64_t row) { sum += e.examples->targets_of(row); });
    return sum;
  }
  const std::vector<Epochs>& sources() const { return sources_; }

 private:
  std::vector<Epochs> sources_;
  MixtureOrder order_;
  int64_t batch_;
};

Sequences in_epochs(const Dataset& dataset, int64_t context, int64_t batch, uint64_t seed) {
  std::vector<Epochs> sources;
  std::vector<int64_t> shares;
  for (const MixturePart& p : dataset.parts) {
    sources.push_back(epochs_of(*p.dataset, context, seed, sources.size()));
    shares.push_back(p.share);
  }
  if (sources.empty()) {
    sources.push_back(epochs_of(dataset, context, seed, 0));
    shares.push_back(1);
  }
  const auto all = std::make_shared<const EpochSequences>(std::move(sources), std::move(shares), batch);
  Sequences made{dataset.tokenizer->vocab_size(),
                 [=](int64_t step, int64_t first, int64_t count, int32_t* inputs, int32_t* targets) {
                   for (int64_t s = 0; s < count; ++s)
                     all->at(step, first + s, [&](const Epochs& e, int64_t row) {
                       e.rows->load(row, 1, inputs + s * e.rows->context(), targets + s * e.rows->context());
                     });
                 }};
  if (!dataset.has_examples()) {
    made.document_end = dataset.tokenizer->document_end();
    return made;
  }
  made.trained = [=](int64_t step) { return all->trained(step); };
  if (all->sources().front().rows->has_starts())
    made.starts = [=](int64_t step, int64_t first, int64_t count, int32_t* starts) {
      for (int64_t s = 0; s < count; ++s)
        all->at(step, first + s,
                [&](const Epochs& e, int64_t row) { e.rows->starts(row, 1, starts + s * e.rows->context()); });
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
    throw FieldError(
        "dp_mode",
        "the loss is a mean over the trained targets of a whole batch, and ps-async updates by the batch of "
        "one worker; expected ddp, dataparallel or ps-sync");
}

int64_t targets_of_step(const Sequences& sequences, int64_t step, int64_t all) {
  return sequences.trained ? sequences.trained(step) : all;
}

Sequences sequences_of(const Dataset& dataset, int64_t context, int64_t batch, uint64_t seed, bool shuffle) {
  if (shuffle || dataset.has_examples() || !dataset.parts.empty() || dataset.train.size() > 1)
    return in_epochs(dataset, context, batch, seed);
  const auto loader = std::make_shared<Loader>(dataset.train.at(0), context, batch, seed);
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
