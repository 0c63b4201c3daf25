// How routers have shared out tokens over the experts of each layer.
#pragma once
#include <cstdint>
#include <vector>

namespace tessera {

class Trainer;

struct ExpertLoad {
  std::vector<std::vector<int64_t>> rows = {};  // by layer and expert: choices of tokens that it took
  int64_t dropped = 0;                          // choices that found no place
  // The busiest expert of its layer: 2 is twice an even share.
  struct Busiest {
    double times = 0;
    int64_t layer = 0, expert = 0;
  };
  Busiest busiest() const;
  bool empty() const { return rows.empty(); }
};

// In the training steps that this trainer has made since it was last asked, over all ranks, the same on each; empty for
// a model without experts. Every rank calls it.
ExpertLoad expert_load(Trainer& trainer);

}  // namespace tessera
