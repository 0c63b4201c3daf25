// Validation loss, and text generation.
#pragma once
#include <cstdint>
#include <functional>
#include <optional>
#include <vector>

#include "data/loader.h"
#include "models/sample.h"
#include "parallel/comm/communicator.h"
#include "train/state.h"

namespace tessera {

struct Evaluation {
  // Sum of the losses of int32 (B, T) tokens, 0 on ranks whose result another rank contributes. `starts`: document
  // starts, if the rows define them.
  std::function<double(const Tensor& ids, const Tensor& targets, const Tensor& starts)> forward;
  const TrainConfig* job = nullptr;
  int64_t vocab = 0;        // of the model
  int64_t at_once = 1;      // sequences per forward pass
  int turn = 0, turns = 1;  // index of this group, and number of groups, which process windows round-robin
  ArenaPtr arena = {};
  std::function<bool()> stop = {};  // polled before each round; true on one rank stops all
};

// Mean loss over the targets of `split`, the same on every rank of `world`; nullopt if stopped. Collective. Throws, on
// every rank, Error (not_finite) for a non-finite loss and Error (usage) for tokens outside the vocabulary.
std::optional<double> mean_loss(const Evaluation& evaluation, Communicator& world, const Rows& split);

// Text generation under a plan: tensor-parallel ranks cache the keys and values of their heads, pipeline ranks of their
// layers; texts are partitioned over data ranks.
//
//   one pass   tokens -> stage 0 -> activations -> stage 1 -> ... -> logits -> sample -> tokens, broadcast to stages
//
// Prompts are prefilled one by one; then all texts generate one token per pass, without padding.

class Generator {
 public:
  // `train` needs no gradients. Throws FieldError for cp, which does not support generation.
  explicit Generator(TrainState& train);

  // `prompts`: of all data ranks, each with at least one token; this rank generates those for which own() is true.
  // `on_token` receives each token, in order, on every rank that has the text, and returns whether to continue.
  // Collective.
  void write(const std::vector<std::vector<int32_t>>& prompts, int64_t tokens, const SampleOptions& options,
             const std::function<bool(size_t prompt, int32_t token)>& on_token);
  bool own(size_t prompt) const;

 private:
  struct Writing;
  Tensor pass(const std::vector<Writing*>& texts);
  void advance(const std::vector<Writing*>& texts, const SampleOptions& options);
  TrainState& train_;
};

}  // namespace tessera
