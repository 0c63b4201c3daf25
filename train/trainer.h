// One rank of a training run: its part of the model, its optimizer, and its place in the data and on the mesh. One path
// for every plan: an axis of size 1 costs nothing, and a run without a pipeline is a pipeline of one stage.
#pragma once

#include "data/token_file.h"
#include "parallel/matrix_owners.h"
#include "parallel/mesh.h"
#include "train/batches.h"

namespace tessera {

// One rank's part of a model, ready for steps: cut over tp and cp, with the units of its pipeline stages alone, its
// memory by the strategy of the data axis, and the loop that executes the schedule.
class ModelPart {
 public:
  struct Axes {
    Communicator &pp, &data, &cp, &tp;
    Communicator* ep = nullptr;  // ranks of `data` that share out experts; DataOptions::experts goes with it
  };
  struct Options {
    Schedule schedule;               // for the ranks of pp, not yet lowered
    std::vector<Range> layers = {};  // layers of each stage; empty: those of split_layers()
    ContextMode cp_mode = ContextMode::ring;
    bool sp = false;
    bool tie_copies = false;  // also in one stage
    DataOptions data = {};
    int64_t sequences = 1;  // sequences of a micro-batch on this rank
    ArenaPtr arena = {};
    Trace* trace = nullptr;
  };
  // `whole` is the model as one rank would have it, and `make` makes its parts. The axes and the trace must outlive it.
  ModelPart(LanguageModel& whole, const ModelFactory& make, const Axes& axes, Options options);

  // A step's passes, over the micro-batches of `source`: the sum of their losses, as PipelineRuntime::step() says.
  DeviceScalar step(BatchSource& source) {
    strategy_->begin_step();
    stages_->take_from(source);
    return runtime_->step();
  }

  LanguageModel& model() { return *model_; }
  DataStrategy& strategy() { return *strategy_; }
  const DataStrategy& strategy() const { return *strategy_; }
  ModelStages& stages() { return *stages_; }
  const PipelineRuntime& runtime() const { return *runtime_; }
  const Schedule& schedule() const { return schedule_; }                // not lowered
  const std::vector<Range>& layers() const { return layers_; }          // layers of each stage
  const std::vector<int64_t>& positions() const { return positions_; }  // positions of this rank's tokens; empty: all

 private:
  void cut(const Axes& axes, const Options& options);

  Schedule schedule_;
  std::vector<Range> layers_;
  std::unique_ptr<LanguageModel> model_;
  std::vector<int64_t> positions_;
  std::unique_ptr<DataStrategy> strategy_;
  std::unique_ptr<ModelStages> stages_;
  std::unique_ptr<PipelineRuntime> runtime_;
};

class StepDump;

class Trainer {
 public:
  // Makes the model with its first weights. Every rank of `world` makes one; `world` and `trace` (may be null; of this
  // rank, of its actions and communications) must outlive it.
  Trainer(const Job& job, Sequences sequences, Communicator& world, Trace* trace = nullptr);
  ~Trainer();

  // One update; on GPUs, of one rank or over NCCL, as train/step.h says, of one rank to the same bits. Throws
  // Error (not_finite) on every rank when the loss or the gradient norm is not a number, before anything is updated.
  // The report says whether any rank wants to stop or to save.
  StepReport step(StepRequest wish = StepRequest::none);
  // The two halves of step(), for those who want to see the gradients in between: they are in strategy().shards().
  StepReport compute_gradients(StepRequest wish = StepRequest::none);
  void update(const StepReport& report);
  // Step `step`, counted from 1, is dumped when it comes (train/dump.h). Every rank calls it.
  void dump(int64_t step, const std::filesystem::path& folder);

  // The mean loss over the targets of a whole split, whose rows have the context's length; the same on every rank.
  // Nothing where a rank has stopped it.
  std::optional<double> mean_loss(const Rows& split, const std::function<bool()>& stop);
  std::optional<double> mean_loss(const TokenFile& split, const std::function<bool()>& stop) {
    return mean_loss(Windows(split, whole_->config.context), stop);
  }
  double mean_loss(const TokenFile& split) { return *mean_loss(split, {}); }

  int64_t steps_done() const { return updates_done() - more_updates_; }
  // A run that was asynchronous once has made more updates than steps.
  int64_t updates_done() const { return optimizer_->steps(); }
  void set_done(int64_t steps, int64_t updates) {
    optimizer_->set_steps(updates);
    strategy().set_steps_done(steps);
    more_updates_ = updates - steps;
  }
  const Job& job() const { return job_; }
  LanguageModel& model() { return part_->model(); }  // this rank's part
  // The whole model, shapes only; the ranks have its parts.
  LanguageModel& full_model() { return *whole_; }
  Optimizer& optimizer() { return *optimizer_; }
  DataStrategy& strategy() { return part_->strategy(); }
  const DataStrategy& strategy() const { return part_->strategy(); }
  Communicator& world() { return world_; }
  Mesh& mesh() { return mesh_; }
  // The ranks that share out the gradients: dp, and cp with it.
  Communicator& data_axis() { return data_axis_; }
  // The ranks of that axis that share out experts: null without such ranks.
  Communicator* expert_ranks() { return ep_.get(); }
  // The world and every axis, once each; each has its own counts of communications.
  std::vector<Communicator*> communicators();
  const Schedule& schedule() const { return part_->runtime().schedule(); }
  const std::vector<Range>& layers() const { return part_->layers(); }  // layers of each stage
  // The pipeline rank that has a unit of the whole model, by its number.
  int pipeline_rank(size_t unit) const { return ranks_of_units_[unit]; }
  const std::vector<int64_t>& positions() const { return part_->positions(); }  // positions of tokens here; empty: all
  DType gradient_dtype() const { return data_options(job_).grad_dtype; }
  int peak_in_flight() const { return part_->runtime().peak_in_flight(); }
  // How steps were made on a GPU; all zero where the host looks into each of them.
  StepGraph::Record step_record() const { return graph_ ? graph_->record() : StepGraph::Record{}; }
  const ArenaPtr& arena() const { return arena_; }
  // Without padding; where it differs from step to step, on average.
  int64_t tokens_per_step() const {
    const int64_t found = tokens_->sequences().tokens_per_step;
    return found > 0 ? found : job_.optim.batch * whole_->config.context;
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
  StepReport queued_step(StepRequest wish);
  double sum_of_squares();
  void sum_tied_gradients();

  Job job_;
  Trace* trace_;
  Communicator& world_;
  Mesh mesh_;
  Communicator& data_axis_;
  std::unique_ptr<Communicator> ep_, edp_;  // neighbours on the data axis; and of a group those with a place among them
  ArenaPtr arena_;
  std::unique_ptr<LanguageModel> whole_;
  std::unique_ptr<ModelPart> part_;
  std::vector<size_t> places_;          // places of this rank's units in the whole model
  std::vector<int> ranks_of_units_;     // places of the whole model's units on the pipeline axis
  std::unique_ptr<Communicator> tied_;  // the ranks with the first and the last stage, where they are two
  std::unique_ptr<StepTokens> tokens_;
  std::unique_ptr<MatrixOwners> matrices_;  // owners of matrices, for an optimizer that needs them whole
  std::unique_ptr<Optimizer> optimizer_;
  std::unique_ptr<StepConsensus> step_ranks_;  // where there are several
  std::unique_ptr<StepGraph> graph_;           // the graph of steps that the host only begins and ends
  std::unique_ptr<StepDump> dump_;             // of a step that may be over
  int64_t more_updates_ = 0;
  LrSchedule schedule_;
};

}  // namespace tessera
