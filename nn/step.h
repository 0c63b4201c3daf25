// Step of a run, as the modules of a model see it.
#pragma once
#include <cstdint>
#include <span>
#include <vector>

#include "nn/documents.h"

namespace tessera {

// Position of a forward pass in the run, for position embeddings and the counter-based RNG: a dropout mask depends only
// on the logical element, in any shard of the activation.
struct StepInfo {
  uint64_t seed = 0;
  int64_t step = 0;
  int64_t first_sequence = 0;   // index of this micro-batch's first row within the global batch
  int64_t sequences_total = 0;  // of the global step, over which losses are averaged; 0: only local sequences
  bool training = false;        // enables dropout
  // Device address of `step` for kernels, because a captured step is replayed with different values.
  const uint64_t* step_on_gpu = nullptr;
  // If sequences are sharded: position of each local token, and tokens of the full sequence. Empty and 0: all tokens,
  // from position 0. The viewed memory must outlive the pass.
  std::span<const int64_t> positions = {};
  int64_t tokens_total = 0;
  // Dropout still uses `positions`.
  Documents documents = {};
  std::vector<int64_t> lengths = {};  // tokens of each sequence before its padding; empty: no padding
  // If attention heads are sharded: first local head, and number of all heads; 0: all are local.
  int64_t first_head = 0, heads_total = 0;
};

}  // namespace tessera
