// Dropout with counted randomness: which elements are dropped is a function of (stream, step, global logical index), so
// any rank makes its own tile of the mask under any split, and recomputation draws it again.
//
// Srivastava et al. 2014, "Dropout"; inverted: kept elements are scaled by 1 / (1 - p).
#pragma once

#include "tensor/random.h"
#include "tensor/tensor.h"

namespace tessera {

// Where the tile x (B, T, C) lies in the whole activation (sequences, tokens_total, channels_total).
struct DropoutTile {
  Philox random{0};
  uint64_t step = 0;
  const uint64_t* step_on_gpu = nullptr;  // where a GPU finds the step when its kernel runs, in place of `step`
  int64_t first_sequence = 0;
  int64_t tokens_total = 0;    // 0: T
  int64_t channels_total = 0;  // 0: C
  int64_t first_channel = 0;
  std::span<const int64_t> positions;  // global position of each of the T tokens; empty: 0, 1, ...
};

// y = x * mask / (1 - p), p in [0, 1). The backward is the same function of dy. Writes over x when its storage is held
// by nobody else. Cost: one pass over memory and ten rounds of Philox per four elements.
Tensor dropout(Tensor&& x, double p, const DropoutTile& tile);

namespace cuda {
// A GPU's kernel, with the same masks, bit for bit. x (B, T, C) contiguous; y may be x. `tile` has its sizes;
// `positions` is int64 (T) on the GPU, or null for 0, 1, ...
void dropout(const Tensor& y, const Tensor& x, double p, const DropoutTile& tile, const Tensor* positions);
}  // namespace cuda

}  // namespace tessera
