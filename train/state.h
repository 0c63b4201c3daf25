// The state of one rank of a training run: its process groups, its part of the model, and the optimizer of its shards.
// Checkpoints, dumps, generation and verification read and set it between steps.
#pragma once
#include <cstdint>
#include <memory>
#include <vector>

#include "parallel/matrix_owners.h"
#include "parallel/mesh.h"
#include "train/config.h"
#include "train/model_part.h"

namespace tessera {

struct RankGroups : NotCopied {
  RankGroups(const TrainConfig& job, Communicator& world);

  Communicator& world;
  Mesh mesh;
  Communicator& data;  // the ranks that reduce gradients: dp x cp
  // With expert parallelism: neighbours on the data axis, which shard the experts, and the ranks with the same experts.
  std::unique_ptr<Communicator> experts, same_experts;
  std::unique_ptr<Communicator> tied;  // the ranks of the first and the last stage, if distinct and a weight is tied
};

class TrainState : NotCopied {
 public:
  // Every rank of `world` constructs one; `world` and `trace` (null: no tracing) must outlive it.
  TrainState(const TrainConfig& job, int64_t vocab, Communicator& world, Trace* trace);

  const TrainConfig job;
  RankGroups groups;
  const ArenaPtr arena;
  LanguageModel& full_model() { return *full_model_; }  // unsharded, as meta tensors
  LanguageModel& model() { return part_->model(); }     // this rank's shard
  ModelPart& part() { return *part_; }
  DataStrategy& strategy() { return part_->strategy(); }
  // Optimizer::steps() exceeds the number of steps in a run that was asynchronous before.
  Optimizer& optimizer() { return *optimizer_; }
  int64_t steps_done() const { return optimizer_->steps() - more_updates_; }
  void set_done(int64_t steps, int64_t updates);
  // The world and every axis, once each, with separate communication counts.
  std::vector<Communicator*> communicators();

 private:
  ModelPart::Options part_options(Trace* trace);
  void join_tied_weights();

  std::unique_ptr<LanguageModel> full_model_;
  std::unique_ptr<ModelPart> part_;
  std::unique_ptr<MatrixOwners> matrices_;  // for an optimizer that updates full matrices
  std::unique_ptr<Optimizer> optimizer_;
  int64_t more_updates_ = 0;
};

}  // namespace tessera
