// GPTQ (Frantar et al. 2022, "GPTQ: accurate post-training quantization for generative pre-trained transformers", arXiv
// 2210.17323, section 3 and algorithm 1): quantizes a weight W (out, in) column by column and compensates the error of
// each column in the remaining ones, to minimize the change of W X for inputs X like those of the calibration.
//
//   H = 2 X X^T + damping mean(diag) I      H^-1 = U^T U, U upper triangular
//   for each column j:  e = (w_j - rounded(w_j)) / U_jj,   w_k -= e U_jk for k > j
//
// Computed in float64 on the host. Rows are independent, so a fused matrix gets the same codes as its components.
#pragma once

#include "tensor/ops/quantize/quantize.h"

namespace tessera {

// 2 X X^T of a layer's inputs: (in, in).
class InputSquares {
 public:
  explicit InputSquares(int64_t columns);
  // Adds inputs x (..., in), of any floating dtype and on any device: one call accumulates in float32 like
  // linear_weight_grad(), and calls accumulate in order in float64. Throws Error if the width differs. Cost: 2 in^2
  // FLOPs per input.
  void add(const Tensor& x);
  int64_t columns() const { return columns_; }
  const std::vector<double>& values() const { return values_; }

 private:
  int64_t columns_;
  std::vector<double> values_;
};

// Rounds W (out, in), float32, to the nearest of its group's 16 values, ties to even. A group's scale is 2 / 15 of its
// largest magnitude, rounded to float16: codes 0 and 15 represent -8 and 7 scales, so values between 7.5 scales and the
// maximum are clipped. Throws Error for values that are not finite or too large for float16.
Int4Matrix round_to_nearest(const Tensor& weight, int64_t group);

// As round_to_nearest(), by GPTQ. A group's scale is that of its updated weights when its first column is processed.
// Columns whose inputs were all zero are rounded to nearest. Throws Error as above, if the widths differ, and if the
// inputs are not finite. Cost: 2/3 in^3 + out in^2 multiply-adds; 16 in^2 + 8 out in bytes of memory.
Int4Matrix gptq(const Tensor& weight, const InputSquares& inputs, int64_t group, double damping = 0.01);

// Relative output error for these inputs: |(W - Q) X|^2 / |W X|^2; 0 if W X is zero.
double output_error(const Tensor& weight, const Int4Matrix& rounded, const InputSquares& inputs);

}  // namespace tessera
