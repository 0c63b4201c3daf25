// GPTQ (Frantar et al. 2022, "GPTQ: accurate post-training quantization for generative pre-trained transformers", arXiv
// 2210.17323, algorithm 1): quantizes a weight W (out, in) column by column and compensates each column's error in the
// remaining ones, to preserve W X for inputs X like the calibration inputs.
//
//   H = 2 X X^T + damping mean(diag) I      H^-1 = U^T U, U upper triangular
//   for each column j:  e = (w_j - rounded(w_j)) / U_jj,   w_k -= e U_jk for k > j
//
// Computed in float64 on the host. Rows are independent, so fusing matrices does not change codes.
#pragma once
#include <cstdint>
#include <vector>

#include "tensor/ops/quantize/quantize.h"

namespace tessera {

// 2 X X^T of a layer's inputs: (in, in).
class InputSquares {
 public:
  explicit InputSquares(int64_t columns);
  // x (..., in), of any floating dtype and device: accumulated in float32 within a call, and over calls in order in
  // float64. Throws Error if the width differs. Cost: 2 in^2 FLOPs per input.
  void add(const Tensor& x);
  int64_t columns() const { return columns_; }
  const std::vector<double>& values() const { return values_; }

 private:
  int64_t columns_;
  std::vector<double> values_;
};

// Rounds W (out, in), float32, to the nearest of its group's 16 values, ties to even. A group's scale is 2 / 15 of its
// largest magnitude in float16: codes 0 and 15 are -8 and 7 scales, so values above 7.5 scales are clipped. Throws
// Error for values that are not finite or too large for float16.
Int4Matrix round_to_nearest(const Tensor& weight, int64_t group);

// A group's scale is computed from its updated weights at its first column; columns whose inputs were zero are rounded
// to nearest. Throws Error like round_to_nearest(), if widths differ, and if inputs are not finite. Cost: 2/3 in^3 +
// out in^2 multiply-adds; 16 in^2 + 8 out in bytes.
Int4Matrix gptq(const Tensor& weight, const InputSquares& inputs, int64_t group, double damping = 0.01);

// |(W - Q) X|^2 / |W X|^2 for these inputs; 0 if W X is zero.
double output_error(const Tensor& weight, const Int4Matrix& rounded, const InputSquares& inputs);

}  // namespace tessera
