// Adam (Kingma and Ba, "Adam: a method for stochastic optimization", ICLR 2015, algorithm 1) and AdamW (Loshchilov and
// Hutter, "Decoupled weight decay regularization", ICLR 2019, algorithm 2).
//
//   g = grad_scale * grad           (+ weight_decay * p when the decay is coupled)
//   m = beta1 m + (1 - beta1) g     v = beta2 v + (1 - beta2) g^2
//   p = p (1 - lr weight_decay, when the decay is decoupled) - lr m' / (sqrt(v') + eps)
//   with m' = m / (1 - beta1^t), v' = v / (1 - beta2^t), both divisors computed in double once per step
#pragma once
#include "optim/optimizer.h"
#include "optim/updates.h"
#include "tensor/random.h"

namespace tessera {

class Adam : public Optimizer {
 public:
  Adam(std::vector<FlatUnit> units, const OptimizerOptions& options, Decay decay);
  UpdateNumbers next(double lr) const override;

 protected:
  // Without state: a derived class says of each unit in turn whether Adam updates it.
  struct Stateless {};
  Adam(std::vector<FlatUnit> units, const OptimizerOptions& options, Decay decay, Stateless /*none*/)
      : Optimizer(std::move(units), options), decay_(decay) {}
  void add_moments(const FlatUnit& unit);
  void leave_out() { states_.emplace_back(), rounding_.emplace_back(); }
  void update(const UpdateNumbers& now, const UpdateNumbers* on_gpu) override;

 private:
  Decay decay_;
  std::vector<AdamState> states_;
  std::vector<std::vector<Philox>> rounding_;  // of each unit; empty where nothing is rounded stochastically
};

}  // namespace tessera
