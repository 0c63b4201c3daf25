// Pipeline stages of a model. A single stage is the full model, so all runs use this path.
//
//   stage 0        embed, layers 0 .. i
//   stage s        layers i + 1 .. j                      input and output (B, T, C)
//   last stage     layers j + 1 .. L - 1, finish, loss
#pragma once
#include <cstdint>
#include <functional>
#include <vector>

#include "models/language_model.h"
#include "parallel/data_step.h"
#include "parallel/data_strategy.h"
#include "parallel/pipeline/runtime.h"

namespace tessera {

// The layers of each stage, at least one per stage. Minimizes the forward FLOPs of the slowest stage, including the
// head in the last; embedding lookups count zero.
std::vector<Range> split_layers(LanguageModel& model, int stages);

// One per unit of the model's layout().
std::vector<int> stages_of_units(LanguageModel& model, const std::vector<Range>& layers);

// Removes the units of other ranks' stages, before materialization.
void retain_stages(LanguageModel& model, const std::vector<Range>& layers, const std::function<bool(int stage)>& mine);

// `ids` and `targets`: int32 (B, T), or meta tensors if BatchSource::load() was called without them.
struct Microbatch {
  Tensor ids, targets;
  double scale = 1;  // loss factor: 1 / targets of the global batch
};

// Source of a step's micro-batches on one rank, queried before each pass: the trainer's data set, or a dry run
// (train/memory.cpp).
class BatchSource {
 public:
  virtual ~BatchSource() = default;
  virtual Microbatch load(int64_t index, bool ids, bool targets) = 0;
  // Position of micro-batch `index` in the run.
  virtual StepInfo where(int64_t index) = 0;
  // Local tokens per sequence.
  virtual int64_t columns(int64_t index) const = 0;
};

class ModelStages final : public Stages {
 public:
  struct Options {
    std::vector<Range> layers;  // by stage
    Shape activation = {};      // local shape between stages, of full-context sequences
    int64_t token_parts = 1;    // number of shards of the local tokens in activations between stages
    DType dtype = DType::float32;
    ArenaPtr arena = {};
  };
  // `model` and `strategy` must outlive it.
  ModelStages(LanguageModel& model, DataStrategy& strategy, Options options);

  // Later passes use this source's micro-batches, and accumulate gradients in this step.
  void begin_step(BatchSource& source, DataStep& step) { source_ = &source, step_ = &step; }
  StageOutput forward(int stage, int microbatch, const Var& input) override;
  Tensor make_activation(int stage, int microbatch) override;
  void enter(int stage, int microbatch) override;
  void accumulate(int stage, int microbatch, const std::function<void()>& pass) override;

  // Forward pass without gradients; returns the loss sum on the last stage, else 0. Collective over `pipeline`, with
  // equal numbers of sequences on all ranks.
  double evaluate(const Microbatch& tokens, const Schedule& schedule, Communicator& pipeline);

 private:
  int last() const { return static_cast<int>(options_.layers.size()) - 1; }
  Var body(int stage, Var x);

  LanguageModel& model_;
  DataStrategy& strategy_;
  Options options_;
  BatchSource& source() const { return require_object(source_, "[stages] source of begin_step()"), *source_; }
  BatchSource* source_ = nullptr;
  DataStep* step_ = nullptr;
  std::vector<UnitRange> units_;  // by stage, in the model's layout
};

}  // namespace tessera
