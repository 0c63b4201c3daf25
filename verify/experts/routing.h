// Routing of tokens to experts. With tp or cp, logits round differently than on one rank, so a token with nearly equal
// logits may be routed to another expert. The oracle then replays the plan's choices, and reports the margin and the
// tokens that it would have routed elsewhere.
#pragma once
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "train/state.h"

namespace tessera {

struct Routing {
  Routing() = default;
  Routing(const LanguageModel& model, int64_t batch);  // empty
  // `positions`: of the layer's tokens in their sequences; empty if all are local.
  void place(size_t layer, const std::vector<MixtureOfExperts::Pass>& passes, std::span<const int64_t> positions = {});

  std::vector<Tensor> chosen = {};  // by layer: int64 (batch, T, k)
  int64_t leaving = 0;              // rows sent to experts on other ranks, over all ranks
  double imbalance = 1;             // maximum rows of a rank's experts in a pass, relative to even routing
};

bool replays_routing(const TrainConfig& job);
// Called before the first step.
void record_passes(LanguageModel& model);
// Routing of the step whose gradients were computed last. Collective.
Routing read_routing(TrainState& train);
// The model's training passes use the choices in `routing` at the time of the pass.
void replay(LanguageModel& model, const std::shared_ptr<const Routing>& routing);

}  // namespace tessera
