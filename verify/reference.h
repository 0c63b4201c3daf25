// The oracle: one rank that trains the same model on the same sequences, and adds what the plan's ranks would add in
// the order in which the plan adds it.
//
// A plan that sums over ranks once per step (DDP, ZeRO-1, DataParallel, the parameter server): each rank's
// micro-batches in order, then the ranks. A plan that sums after every micro-batch (ZeRO-2, ZeRO-3): the ranks of each
// micro-batch, then the micro-batches. With groups of ranks (hybrid sharding) all of this within each group, and then
// the groups. Of experts that ranks share out, those ranks are added first, in each micro-batch, and then the groups of
// them in the place of ranks. The order over ranks is the algorithm's, as its file documents it. Nothing here
// shares code with what it judges but the model, the kernels and the optimizer.
#pragma once

#include "parallel/comm/algorithms.h"
#include "parallel/data_strategy.h"
#include "train/batches.h"
#include "verify/experts/routing.h"

namespace tessera {

// The order of sums, as a plan decides it.
struct SumOrder {
  int ranks = 1;  // with sequences of their own
  // Neighbours among them share out experts, and add the gradients of these first, in each micro-batch.
  int ep = 1;
  Algorithm algorithm = Algorithm::direct;  // the collective's that sums gradients
  bool every_microbatch = false;
  // All gradients in a row: the units that are trained, as pipeline ranks have them, one rank's after another's, by
  // their numbers in the whole model. A copy is the tied weight's use at the end of a pipeline, which has a sum of its
  // own, added to that of its unit at the very end.
  struct Part {
    size_t unit = 0;
    bool copy = false;
  };
  std::vector<Part> parts = {};
  std::vector<ReductionSpan> reductions = {};  // in that row
  // Sums over groups of so many ranks each, after those within: how they are made.
  int group = 0;  // 0: all ranks
  // This rank trains alone, on so many times its part of the gradient as there are ranks; -1: none does.
  int alone = -1;
  Algorithm between_algorithm = Algorithm::direct;
  std::vector<ReductionSpan> between = {};
};

class Reference {
 public:
  Reference(const Job& job, Sequences sequences, SumOrder order);

  // The two halves of a step: the gradients in units(), then the update by them.
  StepReport compute_gradients();
  void update(const StepReport& report);
  // Goes on with other gradients than its own, in the order of units and slots: then update() does what a plan does.
  void adopt(const std::vector<NamedTensor>& gradients);
  // The gradients of one sequence of the step in hand, alone; overwrites those in units().
  void compute_sequence_gradients(int64_t sequence);
  const std::vector<FlatUnit>& units() { return model_->units(); }  // values, and the gradient of the last step
  std::vector<FlatUnit> trained();                                  // those that are not frozen
  // Its own routing of all steps so far, as far as it tells of the plan's ranks; it has no choices.
  const Routing& routing() const { return routing_; }
  // The choices of each step, from now on; and to take those of another run.
  std::shared_ptr<const Routing> keep_choices();
  void replay(const std::shared_ptr<const Routing>& routing) { tessera::replay(*model_, routing); }
  // Tokens whose given choices are not its own, of all passes so far, and the largest margin (Routed::margin).
  int64_t strayed() const { return strayed_; }
  double stray_margin() const { return stray_margin_; }
  const Optimizer& optimizer() const { return *optimizer_; }
  double loss_sum() const { return loss_sum_; }  // the step's in hand
  double step_targets() const;
  const SumOrder& order() const { return order_; }

 private:
  Tensor gradient(int rank, int64_t microbatch, double& loss);
  Tensor gradient_values(int64_t first, int64_t size, double& loss);
  double passes(const Tensor& ids, const Tensor& targets, Tensor& of_head);
  Documents documents(const Tensor& ids, int64_t first, const std::vector<int64_t>& lengths) const;
  const FlatUnit* copied();
  void take(const Tensor& total);
  Tensor sum_of_group(int first, int ranks, std::vector<double>& losses);
  Tensor sum_over_ranks(const std::vector<Tensor>& ranks) const;
  void sum_experts(const std::vector<Tensor>& ranks);
  std::vector<ReductionSpan> reductions_of_parts(bool of_experts) const;
  void note_routing(const std::vector<std::vector<std::vector<int64_t>>>& rows);

  Job job_;
  Sequences sequences_;
  SumOrder order_;
  ArenaPtr arena_, aside_;  // aside: the gradients of ranks and micro-batches
  std::unique_ptr<LanguageModel> model_;
  std::unique_ptr<Optimizer> optimizer_;
  LrSchedule schedule_;
  double loss_sum_ = 0;
  std::vector<std::vector<int64_t>> routed_;  // by the passes that were made last: of each layer, rows of each expert
  Routing routing_;
  std::shared_ptr<Routing> choices_;
  int64_t strayed_ = 0;
  double stray_margin_ = 0;
};

// --- the sums over ranks and micro-batches that the oracle makes, with plain loops ---

// total += x, each element rounded to their dtype.
void add_to(const Tensor& total, const Tensor& x);
// The elements of `reduced` of the sum of the ranks' arrays, in the order in which the algorithm adds them.
void sum_in_order(const std::vector<Tensor>& ranks, const Tensor& out, const ReductionSpan& reduced,
                  Algorithm algorithm);
// The sum over ranks of arrays in a row, made as these collectives make it.
Tensor sum_over(const std::vector<Tensor>& ranks, const std::vector<ReductionSpan>& reductions, Algorithm algorithm);

}  // namespace tessera
