// Which experts tokens were sent to. A plan with tp or cp has other last bits in its logits than one rank, so that a
// token between two experts may go to the other one: then the oracle takes the plan's choices, and it is counted which
// tokens it would have sent elsewhere, and by how much.
#pragma once

#include "train/trainer.h"

namespace tessera {

struct Routing {
  Routing() = default;
  Routing(const LanguageModel& model, int64_t batch);  // nobody's yet
  // A layer's passes are placed; `positions` of its tokens within their sequences, empty where all of them are there.
  void place(size_t layer, const std::vector<MixtureOfExperts::Pass>& passes, std::span<const int64_t> positions = {});

  std::vector<Tensor> chosen = {};  // by layer: int64 (batch, T, k)
  int64_t leaving = 0;              // rows whose expert is on another rank, of all ranks
  double most = 1;  // rows that the experts of a rank got in a pass, at most, by those of an even routing
};

// Whether the oracle takes the plan's choices.
bool replays_routing(const Job& job);
// Before the first step.
void keep_passes(LanguageModel& model);
// The routing of the step whose gradients were computed last; every rank calls it.
Routing read_routing(Trainer& trainer);
// The model's training passes take the choices that stand there when they are made.
void replay(LanguageModel& model, const std::shared_ptr<const Routing>& routing);

}  // namespace tessera
