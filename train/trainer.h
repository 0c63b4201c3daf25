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
#include "parallel/data_step.h"
#include "parallel/matrix_owners.h"
#include "parallel/mesh.h"
#include "train/batches.h"

namespace tessera {

// One rank's executable model shard: partitioned over tp and cp, with only the units of its pipeline stages, parameters
// stored by the data-axis strategy, and the runtime of the schedule.
class ModelPart {
 public:
  struct Axes {
    Communicator &pp, &data, &cp, &tp;
    Communicator* ep = nullptr;  // expert-parallel group of `data`; requires DataOptions::experts
  };
  struct Options {
    Schedule schedule;               // for the pp ranks, before lowering
    std::vector<Range> layers = {};  // by stage; empty: split_layers()
    ContextMode cp_mode = ContextMode::ring;
    bool sp = false;
    bool tie_copies = false;  // even if both uses are in one stage
    DataOptions data = {};
    int64_t sequences = 1;  // local sequences per micro-batch
    ArenaPtr arena = {};
    Trace* trace = nullptr;
  };
  // `full` is the unsharded model, `make` creates its shards. The axes and the trace must outlive this object.
  ModelPart(LanguageModel& full, const ModelFactory& make, const Axes& axes, Options options);

  // Returns the sum of the losses (PipelineRuntime::step()).
  DeviceScalar step(BatchSource& source) {
    step_.emplace(*strategy_);
    stages_->take_from(source);
    return runtime_->step();
  }

  LanguageModel& model() { return *model_; }
  DataStrategy& strategy() { return *strategy_; }
  const DataStrategy& strategy() const { return *strategy_; }
  DataStep& data_step() { return step_.value(); }  // begun by step(), to be completed by the caller
  ModelStages& stages() { return *stages_; }
  const PipelineRuntime& runtime() const { return *runtime_; }
  const Schedule& schedule() const { return schedule_; }                // before lowering
  const std::vector<Range>& layers() const { return layers_; }          // by stage
  const std::vector<int64_t>& positions() const { return positions_; }  // of this rank's tokens; empty: all

 private:
  void cut(const Axes& axes, const Options& options);

  Schedule schedule_;
  std::vector<Range> layers_;
  std::unique_ptr<LanguageModel> model_;
  std::vector<int64_t> positions_;
  std::unique_ptr<DataStrategy> strategy_;
  std::optional<DataStep> step_;
  std::unique_ptr<ModelStages> stages_;
  std::unique_ptr<PipelineRuntime> runtime_;
};

class StepDump;

class Trainer {
 public:
  // Every rank of `world` constructs one; `world` and `trace` (null: no tracing) must outlive it.
  Trainer(const TrainConfig& job, Sequences sequences, Communicator& world, Trace* trace = nullptr);
  ~Trainer();

  // One update. Throws Error (not_finite) on every rank, before updating anything, if the loss or the gradient norm is
  // not finite. On GPUs, one rank or several over NCCL run as train/step.h describes; results for one rank stay bitwise
  // identical.
  StepReport step(StepRequest request = StepRequest::none);
  // The two halves of step(); between them strategy().shards() has the gradients.
  StepReport compute_gradients(StepRequest request = StepRequest::none);
  void update(const StepReport& report);
  // Dumps that step (from 1) when it runs (train/dump.h). Collective.
  void dump(int64_t step, const std::filesystem::path& directory);

  // Mean loss over all targets of a split, whose rows have the context's length; the same on every rank; nullopt if a
  // rank requests a stop.
  std::optional<double> mean_loss(const Rows& split, const std::function<bool()>& stop);
  std::optional<double> mean_loss(const TokenFile& split, const std::function<bool()>& stop) {
    return mean_loss(Windows(split, full_model_->config.context), stop);
  }
  double mean_loss(const TokenFile& split) { return *mean_loss(split, {}); }

  int64_t steps_done() const { return updates_done() - more_updates_; }
  // Exceeds the number of steps in a run that was asynchronous before.
  int64_t updates_done() const { return optimizer_->steps(); }
  void set_done(int64_t steps, int64_t updates) {
    optimizer_->set_steps(updates);
    strategy().set_steps_done(steps);
    more_updates_ = updates - steps;
  }
  const TrainConfig& job() const { return job_; }
  LanguageModel& model() { return part_->model(); }  // this rank's shard
  // Unsharded, as meta tensors.
  LanguageModel& full_model() { return *full_model_; }
  Optimizer& optimizer() { return *optimizer_; }
  DataStrategy& strategy() { return part_->strategy(); }
  const DataStrategy& strategy() const { return part_->strategy(); }
  Communicator& world() { return world_; }
  Mesh& mesh() { return mesh_; }
  // The ranks that reduce gradients: dp x cp.
  Communicator& data_axis() { return data_axis_; }
  // This rank's group on that axis; null without expert parallelism.
  Communicator* expert_ranks() { return ep_.get(); }
  // The world and every axis, once each, with separate communication counts.
  std::vector<Communicator*> communicators();
  const Schedule& schedule() const { return part_->runtime().schedule(); }
  const std::vector<Range>& layers() const { return part_->layers(); }
  int pipeline_rank(size_t unit) const { return ranks_of_units_[unit]; }
  const std::vector<int64_t>& positions() const { return part_->positions(); }  // of local tokens; empty: all
  DType gradient_dtype() const { return data_options(job_).grad_dtype; }
  int peak_in_flight() const { return part_->runtime().peak_in_flight(); }
  // Steps by mode on a GPU; all zero if the host synchronizes within steps.
  StepGraph::Record step_record() const { return graph_ ? graph_->record() : StepGraph::Record{}; }
  const ArenaPtr& arena() const { return arena_; }
  // Without padding; an average if padding varies.
  int64_t tokens_per_step() const {
    const int64_t found = tokens_->sequences().tokens_per_step;
    return found > 0 ? found : job_.optim.batch * full_model_->config.context;
  }

 private:
  ModelPart::Options part_options();
  void split_data_axis();
  void find_units();
  void join_tied_weights();
  void make_graph();
  Tensor queue_squares();
  DeviceScalar queue_passes();
  void queue_sums();
  StepReport queued_step(StepRequest request);
  double sum_of_squares();
  void sum_tied_gradients();

  TrainConfig job_;
  Trace* trace_;
  Communicator& world_;
  Mesh mesh_;
  Communicator& data_axis_;
  std::unique_ptr<Communicator> ep_, edp_;  // groups of neighbours on the data axis; ranks with equal positions in them
  ArenaPtr arena_;
  std::unique_ptr<LanguageModel> full_model_;
  std::unique_ptr<ModelPart> part_;
  std::vector<size_t> places_;          // of this rank's units in the full model
  std::vector<int> ranks_of_units_;     // of the full model's units
  std::unique_ptr<Communicator> tied_;  // ranks of the first and the last stage, if distinct
  std::unique_ptr<StepTokens> tokens_;
  std::unique_ptr<MatrixOwners> matrices_;  // for an optimizer that updates full matrices
  std::unique_ptr<Optimizer> optimizer_;
  std::unique_ptr<StepConsensus> step_ranks_;
  std::unique_ptr<StepGraph> graph_;  // steps without host synchronization
  std::unique_ptr<StepDump> dump_;
  int64_t more_updates_ = 0;
  LrSchedule schedule_;
};

}  // namespace tessera
