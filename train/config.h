// The configuration of a training run: model, hyperparameters, parallelization plan, data and files. Code below the
// command line reads nothing else.
//
//   TrainConfig config{.model = {.layers = 2, .vocab = 64}, .optim = {.lr = 3e-4, .batch = 8}, .plan = {.dp = 2}};
//   check(config);
//   launch(launch_options(config.plan), [&](Communicator& world) {
//     Trainer trainer(config, synthetic_sequences(64, config.model.context, 8, 1), world);
//     for (int i = 0; i < 10; ++i) trainer.step();
//   });
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "data/chat_template.h"
#include "data/text.h"
#include "optim/lr_schedule.h"
#include "optim/optimizer.h"
#include "train/plan.h"

namespace tessera {

// Hyperparameters and other settings independent of the plan. Equal settings mean the same run.
struct Optimisation {
  OptimizerKind optimizer = OptimizerKind::adamw;
  double momentum = OptimizerDefaults().momentum;   // for sgd, and for muon's matrices
  double lr = OptimizerDefaults().lr;               // after warm-up
  std::optional<double> min_lr = {};                // at the end of the cosine decay; unset: lr / 10
  double min_lr_fraction = 0, warmup_fraction = 0;  // fractions of lr and of steps; 0: min_lr and warmup apply
  int64_t warmup = 100, steps = 3000;
  double weight_decay = OptimizerDefaults().weight_decay;
  double beta1 = OptimizerDefaults().beta1, beta2 = OptimizerDefaults().beta2;
  double clip = 1;               // maximum global gradient norm; 0: no clipping
  int64_t batch = 12;            // global batch: sequences per step over all ranks
  int64_t seed = 1337;           // of weights, data order and dropout
  DType dtype = DType::float32;  // of parameters and activations; bfloat16 has float32 master weights
  // Optimizer state; bfloat16 requires bfloat16 parameters and replaces master weights by stochastic rounding.
  DType state_dtype = DType::float32;
  // Restricts attention to documents and restarts positions in each; requires tokens with document boundaries.
  bool document_mask = false;
  bool operator==(const Optimisation&) const = default;
};

constexpr const auto& value_names(OptimizerKind) { return kOptimizerNames; }
Settings field_descriptors(Optimisation& optim);
// Fields for which `is_set` is false receive the optimizer's defaults (optim/rules.h).
void set_defaults(Optimisation& optim, const std::function<bool(std::string_view field)>& is_set);

struct DataConfig {
  std::string source = "austen";  // the data: field `data`
  HeldOut held = {};
  std::optional<std::string> tokenizer = {};  // unset: the initial model's or the preset's
  std::string add_tokens = {}, end = {};
  bool shuffle = false;
  // Fine-tuning examples.
  ChatTemplate chat_template = ChatTemplate::automatic;
  std::string train_on = "responses";
  bool pack = false, skip_bad = false, no_bos = false, special = false;
  std::string map = {}, roles = {};  // renamed keys of an example, and renamed roles
};

struct RunConfig {
  std::optional<std::string> init = {}, base = {};               // initial model, and the base of its adapters
  std::optional<std::string> adapter_base = {}, base_hash = {};  // of adapters: the path and hash of the base model
  std::optional<std::string> out = {};                           // run directory; unset: runs/DATE-TIME
  bool resume = false;                                           // continue the run in `out`
  int64_t save_every = 500, keep = 2, eval_every = 500;
  double save_fraction = 0, eval_fraction = 0;  // fractions of an epoch that replace step counts; 0: unused
  std::optional<double> epochs = {};            // replaces optim.steps (resolve_epochs())
  int64_t patience = 0;                         // validations without improvement that end the run; 0: unlimited
  int64_t check_replicas = 0;                   // steps between checks; 0: only when saving
  bool no_save = false, no_eval = false;
  int64_t dump = 0;  // the step to dump; 0: none
};

struct TrainConfig {
  ModelConfig model = {};  // vocab 0: not yet known
  Optimisation optim = {};
  Plan plan = {};
  ModelFactory make = make_model;  // replaceable by a custom model's factory
  DataConfig data = {};
  RunConfig run = {};
  std::string preset = "gpt-nano";    // the named sizes that `model` extends
  std::optional<int64_t> ranks = {};  // the requested number of ranks, if any
};

// Throws FieldError for invalid model sizes, or if `microbatches` does not divide the batch.
void check_sizes(const TrainConfig& job);
// Throws FieldError if this process cannot start or join `ranks` ranks of the plan's backend.
void check_backend(const Plan& plan, int64_t ranks);
// Throws FieldError if the plan does not divide the batch, the heads or the tokens.
void check_layout(const Plan& plan, const ModelConfig& model, int64_t batch);
// Runs every check of a configuration, including those of this machine's devices. Memory is checked by
// memory_refusal() (train/memory.h). `traced`: the step's actions are traced.
void check(const TrainConfig& job, bool traced = false);

// Whether any checkpoint before the last one is written in the background from a copy.
bool saves_in_background(const TrainConfig& config);

// The full model's config; an unset vocabulary size becomes `tokens_vocab`. Throws FieldError if the configured size is
// smaller.
ModelConfig model_config(const TrainConfig& job, int64_t tokens_vocab);
// The full model with meta tensors.
std::unique_ptr<LanguageModel> full_model(const TrainConfig& job, int64_t tokens_vocab);
DataOptions data_options(const TrainConfig& job);
// Optimizer bytes per trainable parameter, or (`matrices`) per element of full-matrix updates: moments and master copy.
int64_t state_bytes(const Optimisation& optim, bool matrices = false);
DType state_dtype(const Optimisation& optim);  // of the moments
LrSchedule lr_schedule(const Optimisation& optim);
// With Offload::optimizer the state is in a new offload_arena(). `orthogonalise` as in OptimizerOptions.
std::unique_ptr<Optimizer> make_optimizer(const TrainConfig& job, std::vector<FlatUnit> units,
                                          decltype(OptimizerOptions::orthogonalise) orthogonalise = {});

}  // namespace tessera
