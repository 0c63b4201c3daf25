// Descriptors of the hyperparameters, and options of the lower layers derived from a job.
#include "train/config.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "base/error.h"
#include "base/setting.h"
#include "train/device.h"

namespace tessera {
namespace {

constexpr double kMegabyte = 1 << 20;
constexpr double kMaxSteps = 1e12;  // so that steps times ranks stays far below 2^63

// A field whose default may depend on the optimizer; its help ends with the defaults that differ: "...; muon: 0.95".
struct Hyperparameter {
  std::string_view name;
  double Optimisation::*field;
  double OptimizerDefaults::*value;
  std::string help;
};

const std::vector<Hyperparameter>& hyperparameters() {
  using O = Optimisation;
  using D = OptimizerDefaults;
  static const std::vector<Hyperparameter> all = [] {
    std::vector<Hyperparameter> out{
        {"momentum", &O::momentum, &D::momentum, "momentum of sgd [0.9], or of the matrices under muon [0.95]"},
        {"lr", &O::lr, &D::lr, "learning rate after warm-up"},
        {"weight_decay", &O::weight_decay, &D::weight_decay, "weight decay of matrices (none for other parameters)"},
        {"beta1", &O::beta1, &D::beta1, "Adam's decay rate of the first moment"},
        {"beta2", &O::beta2, &D::beta2, "Adam's decay rate of the second moment"}};
    for (Hyperparameter& h : out)
      for (const OptimizerRow& row : kOptimizers)
        if (row.defaults.*h.value != D().*h.value && h.name != "momentum")
          h.help += fmt::format("; {}: {}", row.name, row.defaults.*h.value);
    return out;
  }();
  return all;
}

std::string_view hyperparameter_help(std::string_view name) {
  return std::ranges::find(hyperparameters(), name, &Hyperparameter::name)->help;
}

}  // namespace

void set_defaults(Optimisation& o, const std::function<bool(std::string_view)>& is_set) {
  const OptimizerDefaults common, own = find_row(o.optimizer).defaults;
  for (const Hyperparameter& h : hyperparameters())
    if (own.*h.value != common.*h.value && !is_set(h.name)) o.*h.field = own.*h.value;
}

Settings field_descriptors(Optimisation& o) {
  Settings s;
  s.add("Model",
        {{"dtype", &o.dtype, "dtype of parameters and activations; bf16 has fp32 master weights; fp64 is for verify",
          Field{.choices = "fp32|bf16|fp64", .same = IdentityRole::yes}}});
  s.add("Data", {{"batch", &o.batch, "global batch size: sequences per step",
                  Field{.range = {1, 1e9}, .same = IdentityRole::yes}},
                 {"document_mask", &o.document_mask,
                  "restrict attention to documents and restart positions in each; requires tokens with <|endoftext|>",
                  Field{.same = IdentityRole::unless_default}}});
  s.add("Optimization",
        {{"optimizer", &o.optimizer,
          "optimizer; muon updates the weight matrices of the layers, adamw all other parameters",
          Field{.same = IdentityRole::yes}},
         {"momentum", &o.momentum, hyperparameter_help("momentum"), Field{.range = {0, 1, true}, .open = true}},
         {"steps", &o.steps, "optimizer steps", Field{.range = {1, kMaxSteps}}},
         {"lr", &o.lr, hyperparameter_help("lr"), Field{.range = {0}}},
         {"min_lr", &o.min_lr,
          "learning rate at the end of the cosine schedule; a percentage (5%) is relative to `lr` [10%]",
          Field{.range = {0}, .fraction = &o.min_lr_fraction, .unit_suffix = '%'}},
         {"warmup", &o.warmup, "linear warm-up steps; a percentage (3%) is relative to `steps`",
          Field{.range = {0, kMaxSteps}, .fraction = &o.warmup_fraction, .unit_suffix = '%'}},
         {"state_dtype", &o.state_dtype,
          "dtype of the optimizer's moments; bf16 (requires `dtype` bf16): no master weights, stochastic rounding (8 "
          "bytes per parameter with `grad_dtype` bf16)",
          Field{.choices = "fp32|bf16", .same = IdentityRole::unless_default}},
         {"weight_decay", &o.weight_decay, hyperparameter_help("weight_decay"), Field{.range = {0}}},
         {"beta1", &o.beta1, hyperparameter_help("beta1"), Field{.range = {0, 1, true}}},
         {"beta2", &o.beta2, hyperparameter_help("beta2"), Field{.range = {0, 1, true}}},
         {"clip", &o.clip, "maximum global gradient norm; 0: no clipping", Field{.range = {0}}},
         {"seed", &o.seed, "seed of the sampling RNG", Field{.range = {0}, .same = IdentityRole::yes}}});
  return s;
}

bool saves_in_background(const TrainConfig& c) {
  return !c.run.no_save && c.run.save_every > 0 && c.run.save_every < c.optim.steps &&
         c.plan.offload == Offload::none && c.plan.dp_mode != DataMode::ps_async;
}

ModelConfig model_config(const TrainConfig& s, int64_t tokens_vocab) {
  ModelConfig config = s.model;
  if (config.vocab > 0 && config.vocab < tokens_vocab)
    throw FieldError("vocab", fmt::format("expected at least the tokenizer's vocabulary size, {}, got {}", tokens_vocab,
                                          config.vocab));
  if (config.vocab == 0) config.vocab = tokens_vocab;
  config.recompute = s.plan.recompute;
  config.full_matrix_updates = find_row(s.optim.optimizer).updates_matrices;
  return config;
}

std::unique_ptr<LanguageModel> full_model(const TrainConfig& s, int64_t tokens_vocab) {
  return build_model(s.make, model_config(s, tokens_vocab));
}

namespace {

StrategyOptions strategy_options(const Plan& p, int64_t steps) {
  const int servers = static_cast<int>(p.servers);
  if (p.dp_mode == DataMode::dataparallel) return DataParallelOptions{};
  if (p.dp_mode == DataMode::ps_sync) return ParameterServerOptions{servers};
  if (p.dp_mode == DataMode::ps_async) return AsyncServerOptions{servers};
  if (p.dp_mode == DataMode::diloco) return diloco_options(p, steps);
  if (p.zero != ZeroStage::none)
    return ZeroOptions{.stage = static_cast<int>(p.zero), .shard_ranks = static_cast<int>(p.shard_ranks)};
  return DdpOptions{.bucket_bytes = static_cast<int64_t>(p.bucket_mb * kMegabyte)};
}

}  // namespace

DataOptions data_options(const TrainConfig& s) {
  const DType dtype = s.optim.dtype;
  return {.strategy = strategy_options(s.plan, s.optim.steps),
          .microbatches = s.plan.microbatches,
          .copies = static_cast<int>(s.plan.cp),
          .dtype = dtype,
          .grad_dtype = dtype == DType::float64 ? DType::float64 : s.plan.grad_dtype,
          .seed = static_cast<uint64_t>(s.optim.seed)};
}

DType state_dtype(const Optimisation& o) {
  return o.state_dtype == DType::bfloat16 ? DType::bfloat16 : accum_dtype(o.dtype);
}

int64_t state_bytes(const Optimisation& o, bool matrices) {
  const int64_t moments = std::ssize(state_names(update_rule(o.optimizer, o.momentum, matrices)));
  const bool master = o.dtype == DType::bfloat16 && o.state_dtype != DType::bfloat16;
  return moments * element_size(state_dtype(o)) + (master ? element_size(DType::float32) : 0);
}

LrSchedule lr_schedule(const Optimisation& o) {
  const double warmup_steps = o.warmup_fraction * static_cast<double>(o.steps);
  return {.lr = o.lr,
          .min_lr = o.min_lr_fraction > 0 ? o.min_lr_fraction * o.lr : o.min_lr.value_or(o.lr / 10),
          .warmup = o.warmup_fraction > 0 ? std::llround(warmup_steps) : o.warmup,
          .steps = o.steps};
}

std::unique_ptr<Optimizer> make_optimizer(const TrainConfig& s, std::vector<FlatUnit> units,
                                          decltype(OptimizerOptions::orthogonalise) orthogonalise) {
  const Optimisation& o = s.optim;
  return make_optimizer(o.optimizer, std::move(units),
                        {.momentum = o.momentum,
                         .beta1 = o.beta1,
                         .beta2 = o.beta2,
                         .weight_decay = o.weight_decay,
                         .state = o.state_dtype,
                         .seed = static_cast<uint64_t>(o.seed),
                         .state_arena = s.plan.offload == Offload::optimizer ? offload_arena(s.plan.device) : nullptr,
                         .orthogonalise = std::move(orthogonalise)});
}

}  // namespace tessera
