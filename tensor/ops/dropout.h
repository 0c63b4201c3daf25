// Inverted dropout (Srivastava et al. 2014) with a counter-based RNG: the mask is a function of (stream, step, global
// logical index), so any rank generates its shard under any partition, and recomputation reproduces it.
#pragma once
#include <cstdint>
#include <span>

#include "tensor/random.h"
#include "tensor/tensor.h"

namespace tessera {

// Position of x (B, T, C) in the full activation.
struct DropoutTile {
  Philox random{0};
  uint64_t step = 0;
  const uint64_t* step_on_gpu = nullptr;  // device address; replaces `step`
  int64_t first_sequence = 0;
  int64_t tokens_total = 0;    // 0: T
  int64_t channels_total = 0;  // 0: C
  int64_t first_channel = 0;
  std::span<const int64_t> positions;  // global position of each of the T tokens; empty: 0, 1, ...
};

// y = x * mask / (1 - p), p in [0, 1); backward is the same function of dy. Overwrites x if its storage is not shared.
// Cost: one pass over memory and ten Philox rounds per four elements.
Tensor dropout(Tensor&& x, double p, const DropoutTile& tile);

// Operands of both devices.
template <class T>
struct DropoutOperands {
  using A = Accumulate<T>;
  const T* x;
  T* y;
  const int64_t* positions;  // null: 0, 1, ...
  DropoutTile tile;
  int64_t tokens;
  float threshold;
  A up;

  // Global index of the first element of row i.
  constexpr uint64_t first_index(int64_t i) const {
    const int64_t token = i % tokens, position = positions ? positions[token] : token;
    return static_cast<uint64_t>(
        ((tile.first_sequence + i / tokens) * tile.tokens_total + position) * tile.channels_total + tile.first_channel);
  }
};
template <class T>
DropoutOperands<T> make_dropout(const Tensor& y, const Tensor& x, double p, const DropoutTile& tile,
                                const int64_t* positions) {
  const Device d = x.device();
  const auto up = static_cast<Accumulate<T>>(1 / (1 - p));
  return {x.data_on<T>(d), y.data_on<T>(d), positions, tile, x.dim(1), static_cast<float>(p), up};
}

namespace cuda {
// Masks bitwise identical to the CPU's. x (B, T, C) contiguous; y may be x; sizes in `tile` set; `positions` int64 (T)
// on the GPU or undefined.
void dropout(const Tensor& y, const Tensor& x, double p, const DropoutTile& tile, const Tensor& positions);
}  // namespace cuda

}  // namespace tessera
