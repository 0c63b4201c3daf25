// The oracle: one rank that trains the same model on the same sequences, with the plan's order of sums over ranks and
// micro-batches.
//
// - One reduction per step (DDP, ZeRO-1, DataParallel, parameter server): each rank's micro-batches in order, then the
//   ranks.
// - One reduction per micro-batch (ZeRO-2, ZeRO-3): the ranks of each micro-batch, then the micro-batches.
// - With groups of ranks (hybrid sharding): as above within each group, then the groups.
// - Expert-parallel gradients: first the ranks of a group in each micro-batch, then the groups in place of ranks.
//
// The order over ranks is documented in the algorithm's file. The oracle shares only the model, the kernels and the
// optimizer with the code under test.
#pragma once
#include <cstdint>
#include <memory>
#include <vector>

#include "parallel/comm/algorithms.h"
#include "parallel/data_strategy.h"
#include "train/batches.h"
#include "verify/experts/routing.h"

namespace tessera {

struct SumOrder {
  int ranks = 1;  // data ranks
  // Expert-parallel group size: consecutive ranks whose expert gradients are summed first, in each micro-batch.
  int ep = 1;
  Algorithm algorithm = Algorithm::direct;  // of the collective that sums gradients
  bool every_microbatch = false;
  // Layout of all gradients: the trainable units by pipeline rank, by their indices in the full model. A copy is the
  // tied weight's use at the end of a pipeline, with a separate gradient sum, which is added to its unit's sum last.
  struct Segment {
    size_t unit = 0;
    bool copy = false;
  };
  std::vector<Segment> segments = {};
  std::vector<ReductionSpan> reductions = {};  // of that layout
  // Reductions between groups of ranks, after those within each.
  int group = 0;  // ranks per group; 0: all ranks
  // A rank with local updates, whose gradient is scaled by the number of ranks; -1: none.
  int alone = -1;
  Algorithm between_algorithm = Algorithm::direct;
  std::vector<ReductionSpan> between = {};
};

class Reference {
 public:
  Reference(const TrainConfig& job, Sequences sequences, SumOrder order);

  // The two halves of a step: gradients in units(), then the update.
  StepReport compute_gradients();
  void update(const StepReport& report);
  // Replaces the gradients with the plan's, in the order of units and slots.
  void adopt(const std::vector<NamedTensor>& gradients);
  // Overwrites the gradients in units().
  void compute_sequence_gradients(int64_t sequence);
  const std::vector<FlatUnit>& units() { return model_->units(); }  // values, and gradients of the last step
  std::vector<FlatUnit> trained();                                  // without frozen units
  // Statistics of all steps so far over the plan's ranks, without choices.
  const Routing& routing() const { return routing_; }
  // Records the choices of each subsequent step, or replays another run's choices.
  std::shared_ptr<const Routing> record_choices();
  void replay(const std::shared_ptr<const Routing>& routing) { tessera::replay(*model_, routing); }
  // Tokens whose replayed choice differs from the oracle's, over all passes, and the largest margin (Routed::margin).
  int64_t rerouted_tokens() const { return rerouted_tokens_; }
  double routing_margin() const { return routing_margin_; }
  const Optimizer& optimizer() const { return *optimizer_; }
  double loss_sum() const { return loss_sum_; }  // of the current step
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
  std::vector<ReductionSpan> segment_reductions(bool of_experts) const;
  void note_routing(const std::vector<std::vector<std::vector<int64_t>>>& rows);

  TrainConfig job_;
  Sequences sequences_;
  SumOrder order_;
  ArenaPtr arena_, aside_;  // aside_: gradients of ranks and micro-batches
  std::unique_ptr<LanguageModel> model_;
  std::unique_ptr<Optimizer> optimizer_;
  LrSchedule schedule_;
  double loss_sum_ = 0;
  std::vector<std::vector<int64_t>> routed_;  // of the latest passes: rows by layer and expert
  Routing routing_;
  std::shared_ptr<Routing> choices_;
  int64_t rerouted_tokens_ = 0;
  double routing_margin_ = 0;
};

// total += x, each element rounded to the tensors' dtype.
void add_to(const Tensor& total, const Tensor& x);
// Sum of the ranks' flat arrays in the order of these collectives.
Tensor sum_over(const std::vector<Tensor>& ranks, const std::vector<ReductionSpan>& reductions, Algorithm algorithm);

}  // namespace tessera
