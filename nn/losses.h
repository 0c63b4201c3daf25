// Losses. The cross-entropy of a language model is fused with its softmax: cross_entropy() in autograd/ops.h.
#pragma once
#include "autograd/ops.h"

namespace tessera {

// The mean of (prediction - target)^2 over all elements: two tensors of one shape -> ().
inline Var mean_squared_error(const Var& prediction, const Var& target) {
  if (!(prediction.shape() == target.shape()))
    throw Error("[mean_squared_error] prediction is " + prediction.value().describe() + ", target is " +
                target.value().describe() + "; expected one shape");
  return scale(sum(unary<Square>(prediction - target)), 1.0 / static_cast<double>(prediction.value().numel()));
}

}  // namespace tessera
