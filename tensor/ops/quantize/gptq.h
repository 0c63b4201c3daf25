// GPTQ (Frantar et al. 2022, "GPTQ: accurate post-training quantization for generative pre-trained transformers", arXiv
// 2210.17323, section 3 and algorithm 1): a weight W (out, in) is rounded column by column, and what a column lost is
// made good by the columns that are still to come, so that W X changes least for inputs X like those that were seen.
//
//   H = 2 X X^T + damping mean(diag) I      H^-1 = U^T U, U upper triangular
//   for each column j:  e = (w_j - rounded(w_j)) / U_jj,   w_k -= e U_jk for k > j
//
// All of it is in float64 on the host. Each row goes its own way, so a fused matrix gets the codes that its parts would
// get alone.
#pragma once

#include "tensor/ops/quantize/quantize.h"

namespace tessera {

// 2 X X^T of a layer's inputs, (in, in).
class InputSquares {
 public:
  explicit InputSquares(int64_t columns);
  // Adds inputs x (..., in), of any floating dtype and on any device: the products of one call are summed as
  // linear_weight_grad() does in float32, and calls in their order in float64. Throws Error for another width. Cost: 2
  // in^2 FLOPs for each input.
  void add(const Tensor& x);
  int64_t columns() const { return columns_; }
  const std::vector<double>& values() const { return values_; }

 private:
  int64_t columns_;
  std::vector<double> values_;
};

// W (out, in), float32, each number rounded to the nearest of its group's 16, a tie to the even one. A group's scale is
// 2 / 15 of its largest magnitude, rounded to float16: codes 0 and 15 stand for -8 and 7 scales, so what lies between
// 7.5 scales and the largest is cut. Throws Error for numbers that are not finite or too large for a float16.
Int4Matrix round_to_nearest(const Tensor& weight, int64_t group);

// The same by GPTQ. A group's scale is that of its weights when its first column's turn comes. Inputs that were all
// zero tell nothing: their columns are rounded to the nearest. Throws Error as above, where the widths differ, and
// where the inputs are not finite. Cost: 2/3 in^3 + out in^2 multiplications and additions; 16 in^2 + 8 out in bytes of
// memory.
Int4Matrix gptq(const Tensor& weight, const InputSquares& inputs, int64_t group, double damping = 0.01);

// How much of the layer's output is lost for these inputs: |(W - Q) X|^2 / |W X|^2, 0 where W X is zero.
double output_error(const Tensor& weight, const Int4Matrix& rounded, const InputSquares& inputs);

}  // namespace tessera
