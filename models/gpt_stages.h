// A Gpt as the stages of a pipeline: which layers a stage has, and its forward passes. With one stage it is the whole
// model, so every run goes this way.
//
//   stage 0        tokens + positions, blocks 0 .. i
//   stage s        blocks i + 1 .. j                      input and output (B, T, C)
//   last stage     blocks j + 1 .. L - 1, norm, head, loss
#pragma once
#include <functional>
#include <vector>

#include "models/gpt.h"
#include "parallel/data_strategy.h"
#include "parallel/pipeline/runtime.h"

namespace tessera {

// The layers of each stage, in order, at least one for each. The slowest stage is as fast as can be, counted in FLOPs
// of the forward pass: a block has 24 C^2 + 2 T C per token, the head 2 C V, looking up embeddings nothing.
std::vector<Range> split_layers(const GptConfig& config, int stages);

// What a unit of a Gpt belongs to.
int stage_of_unit(const Gpt& model, const Module::Unit& unit, const std::vector<Range>& layers);

// Takes the units of other ranks' stages out of the model, before it has memory; `mine` says which stages are here.
void keep_stages(Gpt& model, const std::vector<Range>& layers, const std::function<bool(int stage)>& mine);

// What one micro-batch is made of on this rank: int32 (B, T), meta tensors where they are not asked for.
struct Microbatch {
  Tensor ids, targets;
};

class GptStages final : public Stages {
 public:
  struct Options {
    std::vector<Range> layers;  // of every stage
    LossFunction loss;
    double scale = 1;  // of the loss
    // The tokens of a micro-batch, and where it stands in the run.
    std::function<Microbatch(int64_t index, bool ids, bool targets)> load;
    std::function<StepInfo(int64_t index)> where;
    Shape activation = {};  // of what goes from stage to stage on this rank
    DType dtype = DType::float32;
    ArenaPtr arena = {};
  };
  // `model` and `strategy` must outlive it.
  GptStages(Gpt& model, DataStrategy& strategy, Options options);

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

  Gpt& model_;
  DataStrategy& strategy_;
  Options options_;
  std::vector<UnitRange> units_;  // of each stage, in the model's layout
};

}  // namespace tessera
