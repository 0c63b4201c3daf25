// A language model as the stages of a pipeline: which layers a stage has, and its forward passes. With one stage it is
// the whole model, so every run goes this way.
//
//   stage 0        embed, layers 0 .. i
//   stage s        layers i + 1 .. j                      input and output (B, T, C)
//   last stage     layers j + 1 .. L - 1, finish, loss
#pragma once
#include <functional>
#include <vector>

#include "models/language_model.h"
#include "parallel/data_strategy.h"
#include "parallel/pipeline/runtime.h"

namespace tessera {

// The layers of each stage, in order, at least one for each. The slowest stage is as fast as can be, counted in FLOPs
// of the forward pass: those of its layers, and of the head in the last stage. Looking up embeddings costs nothing.
std::vector<Range> split_layers(LanguageModel& model, int stages);

// The stage of each unit of the model's layout().
std::vector<int> stages_of_units(LanguageModel& model, const std::vector<Range>& layers);

// Takes the units of other ranks' stages out of the model, before it has memory; `mine` says which stages are here.
void keep_stages(LanguageModel& model, const std::vector<Range>& layers, const std::function<bool(int stage)>& mine);

// The data of one micro-batch on this rank: int32 (B, T), meta tensors where they are not asked for.
struct Microbatch {
  Tensor ids, targets;
  double scale = 1;  // of the loss: one over the targets of the whole batch
};

class ModelStages final : public Stages {
 public:
  struct Options {
    std::vector<Range> layers;  // of every stage
    // The tokens of a micro-batch, and its place in the run.
    std::function<Microbatch(int64_t index, bool ids, bool targets)> load;
    std::function<StepInfo(int64_t index)> where;
    Shape activation = {};  // of the activation between stages on this rank
    DType dtype = DType::float32;
    ArenaPtr arena = {};
  };
  // `model` and `strategy` must outlive it.
  ModelStages(LanguageModel& model, DataStrategy& strategy, Options options);

  StageOutput forward(int stage, int microbatch, const Var& input) override;
  Tensor make_activation(int stage, int microbatch) override;
  void enter(int stage, int microbatch) override;
  void begin_gradients(int stage, int microbatch) override;
  void end_gradients(int stage, int microbatch) override;

  // The forward pass of this rank's part of a model without gradients: the loss sum where the last stage is, else 0.
  // Every rank of `pipeline` calls it, with the same number of sequences.
  double evaluate(const Microbatch& tokens, const Schedule& schedule, Communicator& pipeline);

 private:
  int last() const { return static_cast<int>(options_.layers.size()) - 1; }
  Var body(int stage, Var x);

  LanguageModel& model_;
  DataStrategy& strategy_;
  Options options_;
  std::vector<UnitRange> units_;  // of each stage, in the model's layout
};

}  // namespace tessera
