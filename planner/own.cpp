// From a case to a job, and what train/ says of it.
#include "planner/own.h"

#include "models/layout.h"
#include "train/expected_bytes.h"
#include "train/memory.h"

namespace tessera::planner {
namespace {

constexpr int64_t kMostLayers = 512;  // that are cut by their FLOPs, and run dry, in no time

std::optional<ModelConfig> config_of(const Case& c) {
  const ModelShape& m = c.model;
  const bool llama = m.gated;
  if (m.layers > kMostLayers || llama != (m.positions == Positions::rope)) return {};
  ModelConfig config{.family = llama ? Family::llama : Family::gpt2,
                     .layers = m.layers,
                     .heads = m.heads,
                     .channels = m.channels,
                     .context = m.context,
                     .vocab = m.vocab,
                     .dropout = c.software.dropout ? 0.1 : 0,
                     .tied = m.tied,
                     .kv_heads = m.kv_heads,
                     .head_dim = m.head_dim,
                     .ffn = m.ffn,
                     .qkv_bias = m.qkv_bias,
                     .qk_norm = m.qk_norm};
  config.experts.count = m.experts;
  if (m.experts > 0) config.experts.per_token = m.experts_per_token;
  return config;
}

}  // namespace

Software own_software(DType dtype, DType grad_dtype, OptimizerKind optimizer) {
  Software s = software_named("tessera");
  s.parameter_bytes = s.gather_bytes = static_cast<double>(size_of(dtype));
  s.gradient_bytes = s.reduce_bytes = static_cast<double>(size_of(dtype == DType::float64 ? dtype : grad_dtype));
  s.state_bytes = static_cast<double>(state_bytes({.optimizer = optimizer, .dtype = dtype}));
  return s;
}

std::optional<Job> own_job(const Case& c) {
  const Software& s = c.software;
  const std::optional<ModelConfig> config = config_of(c);
  if (s.name != "tessera" || !config || c.model.layers > kMostLayers) return {};
  for (const DType dtype : {DType::bfloat16, DType::float32, DType::float64})
    for (const DType grad : {DType::float32, DType::bfloat16})
      for (const OptimizerKind optimizer : {OptimizerKind::adamw, OptimizerKind::sgd}) {
        const Software own = own_software(dtype, grad, optimizer);
        if (own.parameter_bytes != s.parameter_bytes || own.gradient_bytes != s.gradient_bytes ||
            own.state_bytes != s.state_bytes)
          continue;
        Job job{.model = *config,
                .optim = {.optimizer = optimizer, .batch = c.layout.batch(), .dtype = dtype},
                .plan = c.layout.plan};
        job.plan.grad_dtype = grad;
        job.plan.ep = c.layout.ep;
        // Ranks that share no processors have a GPU each.
        job.plan.device = c.hardware.processors == 0 ? Device::cuda : Device::cpu;
        check_sizes(job);
        return job;
      }
  return {};
}

std::vector<int64_t> own_layers(const Job& job) {
  std::vector<int64_t> out;
  for (const Range& r : split_layers(*whole_model(job, job.model.vocab), schedule_of(job.plan).stages))
    out.push_back(r.size());
  return out;
}

std::optional<std::vector<MemoryParts>> own_memory(const Job& job) {
  std::vector<RankMemory> ranks;
  try {
    ranks = memory_of_ranks(job, true);
  } catch (const OutOfMemory&) {  // more addresses than an arena has
    return {};
  }
  const size_t alike = ranks.size() / static_cast<size_t>(job.plan.pp);
  std::vector<MemoryParts> out(static_cast<size_t>(job.plan.pp));
  for (size_t r = 0; r < ranks.size(); ++r) {
    const HeldBytes& held = ranks[r].held;
    const MemoryParts found{.parameters = static_cast<double>(held.parameters),
                            .gradients = static_cast<double>(held.gradients),
                            .optimizer = static_cast<double>(held.optimizer),
                            .activations = static_cast<double>(ranks[r].activations),
                            .communication = static_cast<double>(ranks[r].communication)};
    MemoryParts& most = out[r / alike];
    if (found.peak() > most.peak()) most = found;
  }
  return out;
}

Bytes own_bytes(const Job& job) {
  Bytes out;
  for (const SentBytes& sent : expected_bytes(job, 1))
    if (sent.bytes > 0)
      out[sent.axis][sent.operation] = static_cast<double>(sent.bytes) / static_cast<double>(job.plan.ranks());
  return out;
}

}  // namespace tessera::planner
