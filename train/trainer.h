// One rank of a training run. All plans share one code path: an axis of size 1 costs nothing, and a run without
// pipeline parallelism is a pipeline of one stage.
#pragma once
#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "data/loader.h"
#include "train/batches.h"
#include "train/state.h"

namespace tessera {

class StepDump;

class Trainer {
 public:
  // Every rank of `world` constructs one; `world` and `trace` (null: no tracing) must outlive it.
  Trainer(const TrainConfig& job, Sequences sequences, Communicator& world, Trace* trace = nullptr);
  ~Trainer();

  // One update. Throws Error (not_finite) on every rank, before updating anything, if the loss or the gradient norm is
  // not finite. On GPUs, one rank or several over NCCL run as train/step_graph.h describes; results for one rank stay
  // bitwise identical.
  StepReport step(StepRequest request = StepRequest::none);
  // The two halves of step(); between them strategy().shards() has the gradients.
  StepReport compute_gradients(StepRequest request = StepRequest::none);
  void update(const StepReport& report);
  // Dumps that step (from 1) when it runs (train/dump.h). Collective.
  void dump(int64_t step, const std::filesystem::path& directory);

  // Mean loss over all targets of a split, whose rows have the context's length; the same on every rank; nullopt if a
  // rank requests a stop.
  std::optional<double> mean_loss(const Rows& split, const std::function<bool()>& stop);
  double mean_loss(const TokenFile& split) { return *mean_loss(Windows(split, state_.job.model.context), {}); }

  TrainState& state() { return state_; }
  // Steps by mode on a GPU; all zero if the host synchronizes within steps.
  StepGraph::Record step_record() const { return graph_ ? graph_->record() : StepGraph::Record{}; }

 private:
  void find_units();
  void make_graph();
  Tensor queue_squares();
  DeviceScalar queue_passes();
  void queue_sums();
  StepReport queued_step(StepRequest request);
  double sum_of_squares();
  void sum_tied_gradients();
  DataStrategy& strategy() { return state_.strategy(); }
  Mesh& mesh() { return state_.groups.mesh; }

  TrainState state_;
  Trace* trace_;
  std::vector<size_t> places_;  // of this rank's units in the full model; past its end for the copy of a tied weight
  size_t all_units_ = 0;        // of the full model
  StepTokens tokens_;
  std::unique_ptr<StepConsensus> step_ranks_;
  std::unique_ptr<StepGraph> graph_;  // steps without host synchronization
  std::unique_ptr<StepDump> dump_;
  LrSchedule schedule_;
};

}  // namespace tessera
