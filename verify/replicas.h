// Oracle of a plan with local updates and periodic synchronization (parallel/diloco.cpp): one serial run per replica,
// and plain loops for the outer steps; a single serial run for any other plan. Ranks of the context axis form one
// replica.
#pragma once
#include <cstdint>
#include <memory>
#include <vector>

#include "verify/reference.h"

namespace tessera {

class Replicas {
 public:
  Replicas(const TrainConfig& job, const Sequences& sequences, const SumOrder& order);

  size_t count() const { return all_.size(); }
  Reference& of(int copy) { return *all_[apart_ ? static_cast<size_t>(copy) : 0]; }
  // Returns the loss over all replicas; gradient_norm() returns their norms.
  StepReport compute_gradients();
  double& gradient_norm(int copy) { return reports_[apart_ ? static_cast<size_t>(copy) : 0].grad_norm; }
  // Updates each replica using its norm and, if due, runs the outer step.
  void update();
  // State of the outer optimizer, named like optimizer state.
  const std::vector<NamedTensor>& state() const { return state_; }

 private:
  struct Together {
    size_t unit = 0;
    Tensor common = {}, momentum = {};
    int64_t fragment = 0;
  };
  bool due(int64_t fragment, int64_t step) const;
  void outer_step(int64_t fragment);
  void outer_step(const std::vector<const Together*>& together);

  Plan plan_;
  bool apart_;
  std::vector<std::unique_ptr<Reference>> all_;
  std::vector<StepReport> reports_;
  int64_t last_;  // last step
  std::vector<Together> together_;
  std::vector<NamedTensor> state_;
  ArenaPtr arena_ = make_arena();
};

}  // namespace tessera
