// The oracle of a plan whose ranks train copies of the model alone and compare them after some steps
// (parallel/diloco.cpp): a serial run for each of them, and plain loops for what they do together. Of any other plan it
// is one serial run. Ranks of the context axis are one of them.
#pragma once

#include "verify/reference.h"

namespace tessera {

class Replicas {
 public:
  Replicas(const Job& job, const Sequences& sequences, const SumOrder& order);

  size_t count() const { return all_.size(); }
  // The serial run of a rank, or of all.
  Reference& of(int copy) { return *all_[apart_ ? static_cast<size_t>(copy) : 0]; }
  // The loss is that of all; norms() has each one's.
  StepReport compute_gradients();
  double& gradient_norm(int copy) { return reports_[apart_ ? static_cast<size_t>(copy) : 0].grad_norm; }
  // Each by its norm; and, when it is time, the outer step.
  void update();
  // State that all keep together, named as the optimizer's is.
  const std::vector<NamedTensor>& state() const { return state_; }

 private:
  // A unit that is trained: its values that all have in common, and the outer momentum where there is one.
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
  int64_t last_;  // step
  std::vector<Together> together_;
  std::vector<NamedTensor> state_;
  ArenaPtr arena_ = make_arena();
};

}  // namespace tessera
