// One rank's part of a model, ready for steps: cut over tp and cp, with the units of its pipeline stages alone, its
// memory by the strategy of the data axis, and the loop that executes the schedule. An axis of size 1 costs nothing,
// and a run without a pipeline is a pipeline of one stage.
#pragma once
#include <functional>
#include <memory>
#include <vector>

#include "models/layout.h"
#include "parallel/context_parallel.h"
#include "parallel/pipeline/runtime.h"

namespace tessera {

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
    // The tokens of a micro-batch, and where it stands in the run: asked before each of its passes.
    std::function<Microbatch(int64_t index, bool ids, bool targets)> load = {};
    std::function<StepInfo(int64_t index)> where = {};
    ArenaPtr arena = {};
    Trace* trace = nullptr;
  };
  // `whole` is the model as one rank would have it, and `make` makes its parts. The axes and the trace must outlive it.
  ModelPart(LanguageModel& whole, const ModelFactory& make, const Axes& axes, Options options);

  LanguageModel& model() { return *model_; }
  DataStrategy& strategy() { return *strategy_; }
  const DataStrategy& strategy() const { return *strategy_; }
  ModelStages& stages() { return *stages_; }
  PipelineRuntime& runtime() { return *runtime_; }
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

}  // namespace tessera
