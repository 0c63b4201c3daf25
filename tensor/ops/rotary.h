// Rotary position embedding, RoPE (Su et al. 2021, "RoFormer", arXiv 2104.09864, section 3.2), with Llama's pairing:
// (x_j, x_{j + D/2}) is rotated by the angle position * frequency_j, frequency_j = theta^(-2 j / D).
//
//   one head, D = 8      x0 x1 x2 x3 | x4 x5 x6 x7
//   pairs                (x0, x4) (x1, x5) (x2, x6) (x3, x7); the first rotates fastest
#pragma once
#include <cstdint>
#include <vector>

#include "tensor/tensor.h"

namespace tessera {

enum class RopeScaling : uint8_t {
  none,
  linear,  // positions divided by `factor` (Chen et al. 2023, "Position interpolation", arXiv 2306.15595)
  // Frequencies with fewer than low_freq_factor rotations within original_context are divided by `factor`, those with
  // more than high_freq_factor rotations are unchanged, and the others are interpolated: by rotations (Llama 3.1), or
  // by index, from the last unchanged pair (rounded down) to the first divided one (Peng et al. 2023, "YaRN", arXiv
  // 2309.00071, section 3.2; its beta is high_freq_factor, its alpha low_freq_factor).
  llama3,
  yarn
};

struct RotaryOptions {
  double theta = 10000;
  RopeScaling scaling = RopeScaling::none;
  double factor = 1;
  double low_freq_factor = 1, high_freq_factor = 4;
  int64_t original_context = 8192;
  double attention_factor = 1;  // scales cosines and sines, hence scores by its square (yarn: 0.1 ln(factor) + 1)
  bool operator==(const RotaryOptions&) const = default;
};

// (D / 2), in radians per token.
std::vector<double> rotary_frequencies(const RotaryOptions& options, int64_t head_dim);

// (positions, D): rows [cosines | sines] of D / 2 angles, times attention_factor; float32 or float64, computed in
// float64.
Tensor rotary_table(const RotaryOptions& options, int64_t positions, int64_t head_dim, DType dtype,
                    const ArenaPtr& arena);

// Rotates the first `heads` heads of D elements of each token of x (B, T, W), by the opposite angles if `back`
// (backward). `table` is rotary_table() in x's accumulation dtype; `positions` is int32 (T) or (B, T), or undefined for
// first, first + 1, ... Overwrites x if its storage is not shared. Cost: one pass over memory.
struct RopeArgs {
  int64_t heads = 0;
  Tensor table, positions = {};
  int64_t first = 0;
  bool back = false;
};
Tensor rotate(Tensor&& x, const RopeArgs& rope);

// Operands of both devices.
template <class T>
struct Rotation {
  const T* x;
  T* y;
  const Accumulate<T>* table;
  const int32_t* positions;                    // null: first, first + 1, ...
  int64_t first, rows, tokens, placed, width;  // placed: rows with explicit positions
  int heads, half;
  Accumulate<T> sign;
  // Cosines of a row; its sines follow them.
  constexpr const Accumulate<T>* angles(int64_t row) const {
    return table + (positions ? positions[row % placed] : first + row % tokens) * 2 * half;
  }
};
template <class T>
Rotation<T> make_rotation(const Tensor& y, const Tensor& x, const RopeArgs& rope) {
  const Device d = x.device();
  return {.x = x.data_on<T>(d),
          .y = y.data_on<T>(d),
          .table = rope.table.data_on<Accumulate<T>>(d),
          .positions = rope.positions.data_on<int32_t>(d),
          .first = rope.first,
          .rows = x.dim(0) * x.dim(1),
          .tokens = x.dim(1),
          .placed = rope.positions.defined() ? rope.positions.numel() : x.dim(1),
          .width = x.dim(2),
          .heads = static_cast<int>(rope.heads),
          .half = static_cast<int>(rope.table.dim(1) / 2),
          .sign = rope.back ? Accumulate<T>(-1) : Accumulate<T>(1)};
}

namespace cuda {
// x, y and positions contiguous; y may be x.
void rotate(const Tensor& y, const Tensor& x, const RopeArgs& rope);
}  // namespace cuda

}  // namespace tessera
