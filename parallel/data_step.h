// One step of training with a strategy of the data axis:
//
//   DataStep step(strategy);
//   for each micro-batch j:
//     step.backward(loss of this rank's sequences, from strategy.batches());
//   step.update(optimizer, lr);
//
// To clip gradients, call reduce() before update(), and unit_sums() (parallel/gradient_norm.h) between them.
#pragma once
#include <cstdint>
#include <utility>

#include "autograd/var.h"
#include "optim/optimizer.h"
#include "parallel/data_strategy.h"

namespace tessera {

class DataStep : NotCopied {
 public:
  // `strategy` must outlive this object.
  explicit DataStep(DataStrategy& strategy) : strategy_(strategy) { strategy_.begin_step(); }
  // Accumulates the gradients of the next micro-batch. `seed` is the gradient of `root`; if undefined, it is 1.
  void backward(const Var& root, const Tensor& seed = {}) {
    accumulate(microbatch_++, {}, [&] { tessera::backward(root, {.seed = seed}); });
  }
  // Runs a pass that accumulates the gradients of these units. A pipeline calls it for each pass of its stages, which
  // alternate; each stage has all micro-batches in order.
  template <class Pass>
  void accumulate(int64_t microbatch, UnitRange units, const Pass& pass) {
    strategy_.begin_gradients(microbatch, units);
    pass();
    strategy_.end_gradients(microbatch, units);
  }
  // After the last micro-batch: strategy.shards() then contain the gradient of the global batch. Collective.
  void reduce() {
    if (!std::exchange(is_reduced_, true)) strategy_.reduce_gradients();
  }
  // Reduces the gradients if necessary, updates the shards, and gathers the parameters of the next step. Collective.
  void update(Optimizer& optimizer, double lr, double grad_scale = 1) {
    reduce();
    optimizer.step(lr, grad_scale);
    strategy_.gather_parameters();
  }

 private:
  DataStrategy& strategy_;
  int64_t microbatch_ = 0;
  bool is_reduced_ = false;
};

}  // namespace tessera
