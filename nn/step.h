// Where a forward pass stands in the run, for counted randomness: with it a dropout mask is a function of the logical
// element alone.
#pragma once
#include <cstdint>

namespace tessera {

struct StepInfo {
  uint64_t seed = 0;
  int64_t step = 0;
  int64_t first_sequence = 0;  // index of the first row of this micro-batch within the global batch
  bool training = false;       // dropout is off otherwise
};

}  // namespace tessera
