// What each micro-batch of each data rank brings to the gradients, computed by one rank without a strategy; and their
// sums in the orders of the strategies, and as typical mistakes would have them.
#pragma once
#include <memory>
#include <string>
#include <vector>

#include "models/gpt.h"
#include "train/sequences.h"

namespace tessera::lab {

inline constexpr int64_t kSequences = 2;  // of a micro-batch

struct DataCase {
  int ranks = 2;
  int64_t microbatches = 1;
  int zero = 0;
  int64_t bucket_bytes = int64_t{1} << 20;
  bool idle = false;  // the model has a parameter that is never used

  std::string where(int rank) const;
};

// A GPT; with `idle` a parameter more, declared last, that no gradient reaches.
std::unique_ptr<Gpt> small_model(const DataCase& c);
// Forward and backward of one micro-batch of one rank: its part of the gradient of the mean over the global batch.
void learn(Gpt& model, const DataCase& c, int rank, int64_t microbatch, const ArenaPtr& arena);

// Of every parameter, in order.
using Gradients = std::vector<std::vector<float>>;
void add(Gradients& to, const Gradients& more);

struct MicroGradients {
  DataCase of;
  std::vector<std::string> names;
  std::vector<std::vector<float>> values;     // of the parameters, before the update
  std::vector<std::vector<Gradients>> parts;  // [rank][micro-batch]

  // Each rank's micro-batches in order, then the ranks; or the ranks of each micro-batch, then the micro-batches.
  Gradients summed() const;
  Gradients of_rank(int r) const;            // the sum of its micro-batches
  Gradients of_microbatch(int64_t j) const;  // the sum over ranks
};
MicroGradients micro_gradients(const DataCase& c);

}  // namespace tessera::lab
