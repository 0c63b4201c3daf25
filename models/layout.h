// How the ranks of a mesh share the layers of a model, for LanguageModel::place().
//
//   std::unique_ptr<LanguageModel> model = make_model(config);      // shapes only
//   model->place({.tp = &mesh["tp"], .between = S(1), .cp = &mesh["cp"]});
//   a strategy of the data axis gives it memory
//   model->set_step({..., .tokens_total = T});
//   Loss loss = model->head_loss(model->hidden(ids), targets, scale);
#pragma once

#include "models/language_model.h"
#include "parallel/context_parallel.h"
#include "parallel/data_strategy.h"
#include "parallel/pipeline/runtime.h"
#include "parallel/tensor_parallel.h"

namespace tessera {

// The axes must outlive the model; null is an axis of size 1. The loss is the same on every rank of tp.
struct ModelAxes {
  Communicator* tp = nullptr;
  // How activations lie between the cut products: I, or S(1) for Megatron's sequence parallelism. S(1, T) says how many
  // tokens of a sequence are here, when that is not the context.
  Placement between = I;
  // Each rank has the tokens at context_positions(): a step must say which (StepInfo::positions), and how many there
  // are.
  Communicator* cp = nullptr;
  ContextMode cp_mode = ContextMode::ring;
  // Ranks that share out the experts of each layer, each with sequences of its own.
  Communicator* ep = nullptr;
};

// "2 or 4": the divisors of n next to `wanted`.
std::string divisors_near(int64_t n, int64_t wanted);
inline bool is_cut(const Communicator* axis) { return axis && axis->size() > 1; }

// How activations lie between the cut products, of any number of tokens. Throws Error (usage) naming the numbers,
// and what would work, when the ranks of tp do not divide the heads or the tokens of S(1), or are more than the
// entries of the vocabulary.
Placement checked_between(const ModelConfig& config, const ModelAxes& axes);

// The experts of each layer: cut over tp, their tokens over cp, and shared out over ep. Throws FieldError for ep
// without experts.
void place_experts(LanguageModel& model, const ModelAxes& axes, const Placement& between);

// Attention over sequences that are cut: each rank of `cp` has a part of each.
Attention::Core context_core(Communicator& cp, ContextMode mode);

// --- the stages of a pipeline ---
// Which layers a stage has, and its forward passes. With one stage it is the whole model, so every run goes this way.
//
//   stage 0        embed, layers 0 .. i
//   stage s        layers i + 1 .. j                      input and output (B, T, C)
//   last stage     layers j + 1 .. L - 1, finish, loss

// The layers of each stage, in order, at least one for each. The slowest stage is as fast as can be, counted in
// FLOPs of the forward pass: those of its layers, and of the head in the last stage. Looking up embeddings costs
// nothing.
std::vector<Range> split_layers(LanguageModel& model, int stages);

// The stage of each unit of the model's layout().
std::vector<int> stages_of_units(LanguageModel& model, const std::vector<Range>& layers);

// Takes the units of other ranks' stages out of the model, before it has memory; `mine` says which stages are here.
void keep_stages(LanguageModel& model, const std::vector<Range>& layers, const std::function<bool(int stage)>& mine);

// The data of one micro-batch on this rank: int32 (B, T), meta tensors where they are not asked for.
struct Microbatch {
  Tensor ids, targets;
  double scale = 1;  // the loss is multiplied with it: one over the targets of the whole batch
};

// The source of a step's micro-batches on one rank, asked before each of their passes. A trainer's reads the data set
// (train/batches.h); the measure of memory makes tokens up (train/memory.cpp).
class BatchSource {
 public:
  virtual ~BatchSource() = default;
  // The tokens of a micro-batch, those that are asked for.
  virtual Microbatch load(int64_t index, bool ids, bool targets) = 0;
  // Its place in the run.
  virtual StepInfo where(int64_t index) = 0;
  // How many tokens of each of its sequences are on this rank.
  virtual int64_t columns(int64_t index) const = 0;
};

class ModelStages final : public Stages {
 public:
  struct Options {
    std::vector<Range> layers;  // by stage
    Shape activation = {};      // between stages, on this rank, of sequences that fill the context
    int64_t token_parts = 1;    // of the tokens that are on this rank, activations between stages have one in so many
    DType dtype = DType::float32;
    ArenaPtr arena = {};
  };
  // `model` and `strategy` must outlive it.
  ModelStages(LanguageModel& model, DataStrategy& strategy, Options options);

  // From here on passes are of this source's micro-batches.
  void take_from(BatchSource& source) { source_ = &source; }
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
  BatchSource* source_ = nullptr;
  std::vector<UnitRange> units_;  // by stage, in the model's layout
};

}  // namespace tessera
