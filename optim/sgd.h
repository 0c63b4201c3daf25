// Stochastic gradient descent with heavy-ball momentum, weight decay coupled (added to the gradient), as PyTorch does.
//
//   g = grad_scale * grad + weight_decay * p     b = momentum b + g     p = p - lr b
#pragma once
#include "optim/optimizer.h"
#include "optim/updates.h"

namespace tessera {

// Momentum 0 keeps no state (but the master copy of bfloat16 values).
class Sgd final : public Optimizer {
 public:
  Sgd(std::vector<FlatUnit> units, const OptimizerOptions& options);
  void step(double lr, double grad_scale) override;

 private:
  OptimizerOptions options_;
  std::vector<SgdState> states_;
};

}  // namespace tessera
