// One rank's executable model shard: partitioned over tp and cp, with only the units of its pipeline stages, parameters
// stored by the data-axis strategy, and the runtime of the schedule.
#pragma once
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "models/layout.h"
#include "models/stages.h"
#include "parallel/data_step.h"
#include "parallel/pipeline/runtime.h"
#include "train/plan.h"

namespace tessera {

class ModelPart {
 public:
  struct Axes {
    Communicator &pp, &data, &cp, &tp;
    Communicator* ep = nullptr;  // expert-parallel group of `data`; requires DataOptions::experts
  };
  struct Options {
    const Plan& plan;
    Schedule schedule;               // for the pp ranks, before lowering
    std::vector<Range> layers = {};  // by stage; empty: split_layers()
    DataOptions data = {};
    int64_t sequences = 1;  // local sequences per micro-batch
    ArenaPtr arena = {};
    Trace* trace = nullptr;
  };
  // `full` is the unsharded model, `make` creates its shards. The axes and the trace must outlive this object.
  ModelPart(LanguageModel& full, const ModelFactory& make, const Axes& axes, Options options);

  // Returns the sum of the losses (PipelineRuntime::step()).
  DeviceScalar step(BatchSource& source) {
    stages_->begin_step(source, step_.emplace(*strategy_));
    return runtime_->step();
  }

  LanguageModel& model() { return *model_; }
  DataStrategy& strategy() { return *strategy_; }
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

}  // namespace tessera
