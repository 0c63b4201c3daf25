// Rotary positions (Su et al. 2021, "RoFormer", arXiv 2104.09864, section 3.2), as Llama pairs the numbers of a head:
// (x_j, x_{j + D/2}) is turned by the angle position * frequency_j, frequency_j = theta^(-2 j / D). A product of a
// query and a key so sees how far apart they stand and not where.
//
//   one head, D = 8      x0 x1 x2 x3 | x4 x5 x6 x7
//   pairs                (x0, x4) (x1, x5) (x2, x6) (x3, x7), the first turns fastest
#pragma once

#include "tensor/tensor.h"

namespace tessera {

// How a model goes beyond the context that its frequencies were trained with.
enum class RopeScaling : uint8_t {
  none,
  linear,  // positions divided by `factor` (Chen et al. 2023, "Position interpolation", arXiv 2306.15595)
  // Frequencies that turn less than low_freq_factor times within original_context are divided by `factor`, those that
  // turn more than high_freq_factor times are kept, and those between them are mixed: by their turns (Llama 3.1), or by
  // their places, from the last whole pair that is kept to the first that is divided (Peng et al. 2023, "YaRN", arXiv
  // 2309.00071, section 3.2; beta is high_freq_factor there, and alpha low_freq_factor).
  llama3,
  yarn
};

struct RotaryOptions {
  double theta = 10000;
  RopeScaling scaling = RopeScaling::none;
  double factor = 1;
  double low_freq_factor = 1, high_freq_factor = 4;
  int64_t original_context = 8192;
  double attention_factor = 1;  // of every cosine and sine, so scores have its square (yarn: 0.1 ln(factor) + 1)
  bool operator==(const RotaryOptions&) const = default;
};

// The frequencies of the D / 2 pairs, in radians per token.
std::vector<double> rotary_frequencies(const RotaryOptions& options, int64_t head_dim);

// (positions, D): a row is [cosines | sines] of a position's D / 2 angles, times attention_factor; float32, or float64.
// Worked out in float64.
Tensor rotary_table(const RotaryOptions& options, int64_t positions, int64_t head_dim, DType dtype,
                    const ArenaPtr& arena);

// Turns the first `heads` heads of D numbers of each token of x (B, T, W), `back` by the opposite angles, which is the
// backward pass. `table` is rotary_table() in the type of x's sums; `positions` int32 (T), or (B, T) where each
// sequence has its own, all within the table, or undefined for first, first + 1, ... Writes over x when its storage is
// held by nobody else. Cost: one pass over memory.
struct RopeArgs {
  int64_t heads = 0;
  Tensor table, positions = {};
  int64_t first = 0;
  bool back = false;
};
Tensor rotate(Tensor&& x, const RopeArgs& turn);

namespace cuda {
// A GPU's kernel, with the CPU's bits: x, y and positions contiguous, y may be x.
void rotate(const Tensor& y, const Tensor& x, const RopeArgs& turn);
}  // namespace cuda

}  // namespace tessera
