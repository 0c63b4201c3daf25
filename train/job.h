// A whole training run: the model, its optimisation, and the plan of the ranks.
//
//   Job job{.model = {.layers = 2, .vocab = 64}, .optim = {.lr = 3e-4, .batch = 8}, .plan = {.dp = 2}};
//   check(job);
//   launch(launch_options(job.plan), [&](Communicator& world) {
//     Trainer trainer(job, synthetic_sequences(64, job.model.context, 8, 1), world);
//     for (int i = 0; i < 10; ++i) trainer.step();
//   });
#pragma once

#include "optim/lr_schedule.h"
#include "optim/optimizer.h"
#include "train/plan.h"

namespace tessera {

// The settings that are the same under every plan. With equal ones two runs are the same run.
struct Optimisation {
  OptimizerKind optimizer = OptimizerKind::adamw;
  double momentum = 0.9;                      // momentum of sgd, and of muon's matrices
  double lr = 1e-3;                           // after the warm-up
  std::optional<double> min_lr = {};          // at the end of the cosine; not given: a tenth of lr
  double min_lr_share = 0, warmup_share = 0;  // of lr and of steps, in place of those numbers; 0: none
  int64_t warmup = 100, steps = 3000;
  double weight_decay = 0.1, beta1 = 0.9, beta2 = 0.99;
  double clip = 1;               // largest global gradient norm; 0 does not clip
  int64_t batch = 12;            // sequences per step, of all ranks
  int64_t seed = 1337;           // the seed of weights, data order and dropout
  DType dtype = DType::float32;  // dtype of parameters and activations; bfloat16 keeps float32 master weights
  // The dtype of the optimizer's state; bfloat16, for bfloat16 parameters: without master weights, rounded
  // stochastically.
  DType state_dtype = DType::float32;
  // Attention stays within documents, and positions begin again in each; the tokens must say where documents end.
  bool document_mask = false;
  bool operator==(const Optimisation&) const = default;
};

constexpr const auto& value_names(OptimizerKind) { return kOptimizerNames; }
Settings field_descriptors(Optimisation& optim);

struct Job {
  ModelConfig model = {};  // vocab 0: not known yet
  Optimisation optim = {};
  Plan plan = {};
  ModelFactory make = make_model;  // for a model of your own: another
};

// Throws FieldError for sizes that do not divide each other, whatever the ranks.
void check_sizes(const Job& job);
// Throws FieldError where this process cannot start, or be one of, so many ranks of that kind.
void check_backend(const Plan& plan, int64_t ranks);
// Throws FieldError for a job that no machine can run: a batch, heads or tokens that the plan cannot divide.
void check_layout(const Plan& plan, const ModelConfig& model, int64_t batch);
// All of these checks, and those of this machine (memory, devices). `traced`: the parts of each step are noted.
void check(const Job& job, bool traced = false);

// The whole model, with the vocabulary of the tokens where the job has none. Throws FieldError where it is smaller.
ModelConfig model_config(const Job& job, int64_t tokens_vocab);
// It, shapes only.
std::unique_ptr<LanguageModel> full_model(const Job& job, int64_t tokens_vocab);
DataOptions data_options(const Job& job);
// Bytes that the optimizer keeps of each parameter that is trained, or of those in matrices that it updates as wholes:
// moments, and the master copy of bfloat16.
int64_t state_bytes(const Optimisation& optim, bool matrices = false);
DType state_dtype(const Optimisation& optim);  // dtype of the moments
LrSchedule lr_schedule(const Optimisation& optim);
// With Offload::optimizer the state lies elsewhere (offload_arena()), in a place of its own for each call.
// `orthogonalise` as in OptimizerOptions.
std::unique_ptr<Optimizer> make_optimizer(const Job& job, std::vector<FlatUnit> units,
                                          decltype(OptimizerOptions::orthogonalise) orthogonalise = {});

}  // namespace tessera
