// The loss over a whole split.
#pragma once

#include "models/sample.h"
#include "parallel/comm/communicator.h"
#include "train/trainer.h"

namespace tessera {

struct Evaluation {
  // The sum of losses of int32 (B, T) tokens that this rank is to add: 0 where another rank adds it. `starts`: of their
  // documents, where the rows know them.
  std::function<double(const Tensor& ids, const Tensor& targets, const Tensor& starts)> forward;
  const Job* job = nullptr;
  int64_t at_once = 1;      // sequences of one forward pass
  int turn = 0, turns = 1;  // groups of ranks take turns
  ArenaPtr arena = {};
  std::function<bool()> stop = {};  // asked before each round; what one rank says all do
};

// The mean loss over the targets of `split`; the same on every rank of `world`, each of
// which calls it; nothing where it was stopped. Throws Error (not_finite) when it is not a number.
std::optional<double> mean_loss(const Evaluation& evaluation, Communicator& world, const Rows& split);

// Texts that a model writes under a plan: tensor-parallel ranks keep the keys and values of their heads, pipeline ranks
// those of their layers, and the texts are dealt out among data ranks.
//
//   one pass   tokens -> stage 0 -> activations -> stage 1 -> ... -> logits -> draw -> tokens, told to all stages
//
// Texts are read one by one, whatever their lengths, and then written together, a token of each in a pass: nothing is
// padded.

class Generator {
 public:
  // The part of a model that needs no gradients. Throws FieldError for axes that do not write text (cp).
  explicit Generator(Trainer& part);

  // The prompts of all data ranks, each of at least one token; this rank writes those of own(). `told` hears each token
  // on every rank that has the text, in order, and says whether the text goes on. Every rank calls it.
  void write(const std::vector<std::vector<int32_t>>& prompts, int64_t tokens, const SampleOptions& options,
             const std::function<bool(size_t prompt, int32_t token)>& told);
  bool own(size_t prompt) const;

 private:
  struct Writing;
  Tensor pass(const std::vector<Writing*>& texts);
  void advance(const std::vector<Writing*>& texts, const SampleOptions& options);
  Trainer& part_;
};

}  // namespace tessera
