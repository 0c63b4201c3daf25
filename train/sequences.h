// Where the sequences of a training step come from.
#pragma once
#include <cstdint>
#include <functional>
#include <optional>

#include "data/dataset.h"
#include "train/job.h"

namespace tessera {

struct Sequences {
  int64_t vocab = 0;
  // Sequences [first, first + count) of a step: `inputs` and the tokens after them, `targets`, both (count, context).
  // A target may be Rows::kIgnored only where `trained` is there.
  std::function<void(int64_t step, int64_t first, int64_t count, int32_t* inputs, int32_t* targets)> load;
  std::optional<int32_t> document_end = {};  // the token that ends documents, where there is one
  // How many targets of a step's whole batch are trained, the same on every rank: the loss is their mean. Without it
  // all are.
  std::function<int64_t(int64_t step)> trained = {};
  // Where the documents begin, for sequences that know it without such a token: for each token the place in its
  // sequence, (count, context).
  std::function<void(int64_t step, int64_t first, int64_t count, int32_t* starts)> starts = {};
};

// That token, for a run that masks documents by it. Throws FieldError where there is none.
int32_t document_end_of(const Sequences& sequences);

// Whether the job can be trained on them. Throws FieldError: documents that are to be masked and cannot be told;
// targets that are not all trained, under a plan whose updates have no whole batch to take the mean over.
void check_sequences(const Job& job, const Sequences& sequences);

// The targets that the loss of a step is divided by.
int64_t targets_of_step(const Sequences& sequences, int64_t step, int64_t all);

// Sequences of the training split, which must outlive the result. Examples, shards and mixtures come in epochs, and so
// does a single file if it is to be shuffled: each row (data/examples.h, or TrainingWindows) once in an epoch, in an
// order of its own (data/loader.h). Otherwise sequences of a file begin where Loader draws them. Throws InputError,
// Error (usage) for files that are too short.
Sequences sequences_of(const Dataset& dataset, int64_t context, int64_t batch, uint64_t seed, bool shuffle = false);

// Counted random tokens in [0, vocab), most of which follow from the one before, so that there is something to learn.
// Any rank can make any sequence, and no file is needed. Token 0 ends documents.
Sequences counted_sequences(int64_t vocab, int64_t context, int64_t batch, uint64_t seed);

}  // namespace tessera
