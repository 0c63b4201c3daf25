// Where a forward pass stands in the run, for counted randomness and positions: with it a dropout mask is a function of
// the logical element alone, whatever part of the activation is computed here.
#pragma once
#include <cstdint>
#include <span>

#include "nn/documents.h"

namespace tessera {

struct StepInfo {
  uint64_t seed = 0;
  int64_t step = 0;
  int64_t first_sequence = 0;  // index of the first row of this micro-batch within the global batch
  bool training = false;       // dropout is off otherwise
  // Where a GPU finds `step` when its kernels run, which then draw by that: a captured step is replayed with others.
  const uint64_t* step_on_gpu = nullptr;
  // Of a part of each sequence: the position of each of its tokens, and how many tokens the whole has. Empty and 0: the
  // tokens are all there are, from position 0. What it views must outlive the pass.
  std::span<const int64_t> positions = {};
  int64_t tokens_total = 0;
  // Of sequences that hold several documents. Dropout goes by `positions` none the less.
  Documents documents = {};
  // Of a part of the attention heads: where it begins, and how many the whole has; 0: all heads are here.
  int64_t first_head = 0, heads_total = 0;
};

}  // namespace tessera
