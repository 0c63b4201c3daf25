// From a job to what the libraries below are told.
#include "train/job.h"

#include <fmt/format.h>

#include "tensor/error.h"
#include "train/device.h"

namespace tessera {
namespace {

constexpr double kMegabyte = 1 << 20;

}  // namespace

ModelConfig model_config(const Job& s, int64_t tokens_vocab) {
  ModelConfig config = s.model;
  if (config.vocab > 0 && config.vocab < tokens_vocab)
    throw FieldError("vocab",
                     fmt::format("expected at least the tokenizer's {}, found {}", tokens_vocab, config.vocab));
  if (config.vocab == 0) config.vocab = tokens_vocab;
  config.recompute = s.plan.recompute;
  config.whole_updates = s.optim.optimizer == OptimizerKind::muon;
  return config;
}

std::unique_ptr<LanguageModel> whole_model(const Job& s, int64_t tokens_vocab) {
  return s.make(model_config(s, tokens_vocab));
}

DataOptions data_options(const Job& s) {
  const DType dtype = s.optim.dtype;
  return {.mode = s.plan.dp_mode,
          .servers = static_cast<int>(s.plan.servers),
          .zero = static_cast<int>(s.plan.zero),
          .shard_ranks = static_cast<int>(s.plan.shard_ranks),
          .sync = {.every = s.plan.sync_every, .fragments = s.plan.sync_fragments, .last = s.optim.steps},
          .outer_lr = s.plan.outer_lr,
          .outer_momentum = s.plan.outer_momentum,
          .microbatches = s.plan.microbatches,
          .copies = static_cast<int>(s.plan.cp),
          .bucket_bytes = static_cast<int64_t>(s.plan.bucket_mb * kMegabyte),
          .dtype = dtype,
          .grad_dtype = dtype == DType::float64 ? DType::float64 : s.plan.grad_dtype,
          .seed = static_cast<uint64_t>(s.optim.seed)};
}

DType state_dtype_of(const Optimisation& o) {
  return o.state_dtype == DType::bfloat16 ? DType::bfloat16 : wide_of(o.dtype);
}

int64_t state_bytes(const Optimisation& o, bool matrices) {
  const int64_t moments = std::ssize(states_of(rule_of(o.optimizer, o.momentum, matrices)));
  const bool master = o.dtype == DType::bfloat16 && o.state_dtype != DType::bfloat16;
  return moments * size_of(state_dtype_of(o)) + (master ? size_of(DType::float32) : 0);
}

LrSchedule lr_schedule(const Optimisation& o) {
  return {.lr = o.lr, .min_lr = o.min_lr.value_or(o.lr / 10), .warmup = o.warmup, .steps = o.steps};
}

std::unique_ptr<Optimizer> make_optimizer(const Job& s, std::vector<FlatUnit> units,
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
