// What the kernels of a training step take on a processor: a sum of a few measured constants, each times a size.
//
//   product     call, 2 m n k, m n, m k, n k      of (m, k) by (k, n): a start-up for each output, and packing of both
//   attention   call, b h t d, b h t s, b h t s d of t queries and s keys that are not masked
//   the others  call, rows, rows x columns
//
// A constant is seconds for one of these; fit() finds those that explain what was timed, none of them negative.
#pragma once
#include <array>
#include <cstdint>
#include <map>
#include <string_view>
#include <vector>

namespace tessera::planner {

enum class Kernel : uint8_t {
  product_forward,  // x w^T + b,
  product_input,    // the gradient of x,
  product_weight,   // and those of w and b
  attention_forward,
  attention_backward,
  norm_forward,
  norm_backward,
  add_norm_forward,
  add_norm_backward,
  gelu_forward,  // with the bias
  gelu_backward,
  swiglu_forward,
  swiglu_backward,
  rotate,  // either way
  add,     // of two branches; backward it costs nothing
  lookup_forward,
  lookup_backward,
  loss_forward,
  loss_backward,
  accumulate,  // one gradient onto another, float32
  squares,     // of gradients, for their norm
  update,      // AdamW
};
inline constexpr std::array<std::string_view, 22> kKernelNames = {"product_forward",
                                                                  "product_input",
                                                                  "product_weight",
                                                                  "attention_forward",
                                                                  "attention_backward",
                                                                  "norm_forward",
                                                                  "norm_backward",
                                                                  "add_norm_forward",
                                                                  "add_norm_backward",
                                                                  "gelu_forward",
                                                                  "gelu_backward",
                                                                  "swiglu_forward",
                                                                  "swiglu_backward",
                                                                  "rotate",
                                                                  "add",
                                                                  "lookup_forward",
                                                                  "lookup_backward",
                                                                  "loss_forward",
                                                                  "loss_backward",
                                                                  "accumulate",
                                                                  "squares",
                                                                  "update"};
inline constexpr size_t kKernels = kKernelNames.size(), kSizes = 5;

// What a kernel's constants are called, as many as it has.
const std::vector<std::string_view>& size_names(Kernel kernel);

using Sizes = std::array<double, kSizes>;  // of one call; the first is 1
Sizes product_sizes(double m, double n, double k);
Sizes attention_sizes(double heads, double queries, double keys, double head_dim);  // heads: of all sequences
Sizes row_sizes(double rows, double columns);

using Cost = std::array<double, kSizes>;
double seconds(const Cost& cost, const Sizes& sizes);

// A call that was timed.
struct Timed {
  Sizes sizes = {};
  double seconds = 0;
};
// The constants for which the sum of the squares of relative errors is least. Throws Error where nothing was timed, or
// a time is no positive number.
Cost fit(const std::vector<Timed>& timed);

}  // namespace tessera::planner
