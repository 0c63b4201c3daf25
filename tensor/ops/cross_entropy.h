// Cross-entropy of logits with integer targets, by blocks of the vocabulary, in place backward.
//
// The softmax is never stored: forward keeps one number per row, the log of its denominator, found with an online
// maximum (Milakov and Gimelshein 2018) over blocks that stay in cache; backward turns the logits into their own
// gradients.
#pragma once
#include "tensor/tensor.h"

namespace tessera {

inline constexpr int32_t kIgnoredTarget = -1;

struct CrossEntropy {
  double loss_sum = 0;  // over target tokens, each row's loss added in row order
  int64_t count = 0;    // target tokens: rows whose target is not kIgnoredTarget
  Tensor lse;           // (N): log of the sum of the exponentials; float32, or float64 for float64
};

// logits (N, V), targets int32 (N) in [0, V) or kIgnoredTarget. Throws naming the row of a target outside. Cost: one
// read of the logits.
CrossEntropy cross_entropy(const Tensor& logits, const Tensor& targets);
// dlogits = (softmax - onehot(target)) * scale, zero in ignored rows. Writes over the logits when their storage is held
// by nobody else.
Tensor cross_entropy_backward(Tensor&& logits, const Tensor& targets, const Tensor& lse, double scale);

}  // namespace tessera
