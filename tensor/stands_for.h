// The device for which an arena stands in a dry run (cpu::Idle): Arena::local, set by whoever makes the arena. Ops
// whose memory differs between devices take from it what they would take there: on a GPU logits stand whole, and
// products take nothing beside their operands, as they have no packed weights and no wide copies.
#pragma once
#include "tensor/cpu/vectorize.h"
#include "tensor/tensor.h"

namespace tessera {

struct StandsFor {
  Device device = Device::cpu;
};
inline bool stands_for_gpu(const Tensor& t) {
  return cpu::Idle::here() && t.arena()->local<StandsFor>().device == Device::cuda;
}

}  // namespace tessera
