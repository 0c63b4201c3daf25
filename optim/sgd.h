// Stochastic gradient descent with heavy-ball momentum, weight decay coupled (added to the gradient), as PyTorch does.
//
//   g = grad_scale * grad + weight_decay * p     b = momentum b + g     p = p - lr b
#pragma once
#include "optim/optimizer.h"
#include "optim/updates.h"
#include "tensor/random.h"

namespace tessera {

// Momentum 0 keeps no state (but the master copy of bfloat16 values).
class Sgd final : public Optimizer {
 public:
  Sgd(std::vector<FlatUnit> units, const OptimizerOptions& options);
  UpdateNumbers next(double lr) const override;

 private:
  void update(const UpdateNumbers& now, const UpdateNumbers* on_gpu) override;
  std::vector<SgdState> states_;
  std::vector<std::vector<Philox>> rounding_;  // of each unit; empty where nothing is rounded stochastically
};

}  // namespace tessera
