// Documents packed into one sequence. Attention does not cross document boundaries and positions restart at 0, so each
// document is computed independently.
//
//   ids         7 3 E 5 6 8 E E 4      E ends a document and belongs to it
//   starts      0 0 0 3 3 3 3 7 8
//   positions   0 1 2 0 1 2 3 0 0
#pragma once
#include <cstdint>
#include <span>
#include <vector>

#include "tensor/tensor.h"

namespace tessera {

// Undefined: each sequence is one document, from position 0.
struct Documents {
  static constexpr int32_t kPadding = 1 << 30;  // start of a padding token: no token attends to it
  Tensor starts;     // int32 (B, Tq): start of each query's document, as a position in the full sequence
  Tensor positions;  // int32 (B, T): within each token's document
  // Each sequence is one document followed by padding, which attention may process: its outputs are unused.
  bool only_padding = false;
};

// Full sequences: ids int32 (B, T) -> starts and positions, both (B, T), all in host memory.
Documents find_documents(const Tensor& ids, int32_t end);

// starts int32 (B, T), in host memory.
Documents documents_from(const Tensor& starts);

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
