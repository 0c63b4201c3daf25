// The device for which an arena stands in a dry run (cpu::Idle): Arena::local, set by whoever makes the arena. Ops
// whose memory differs between devices take from it what they would take there: on a GPU logits stand whole, and
// products and attention take nothing beside their operands: no packed weights, wide copies or tiles of threads. What
// libraries take there while they compute is not known and not counted.
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
