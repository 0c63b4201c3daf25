// Text to types, and the number of ranks.
#include "app/job_of.h"

#include <fmt/format.h>

#include <algorithm>
#include <thread>
#include <vector>

#include "app/option_values.h"
#include "data/files.h"
#include "models/adapters/adapters.h"
#include "models/language_model.h"
#include "parallel/comm/surroundings.h"
#include "tensor/error.h"
#include "tensor/findings.h"
#include "train/names.h"

namespace tessera {
namespace {

constexpr int64_t kDefaultRanks = 2;

// Options were checked against the same names when they were set.
template <class Enum>
Enum chosen(const std::string& name) {
  return value_named<Enum>(names_of(Enum{}), name).value();
}

Recompute recompute_of(const TrainOptions& o) { return chosen<Recompute>(std::string(recompute_name(o.recompute))); }

// Adapters of such a model.
LoraConfig lora_of(const TrainOptions& o, const ModelConfig& model) {
  LoraConfig c{.rank = o.lora_rank,
               .alpha = o.lora_alpha.value_or(static_cast<double>(o.lora_rank)),
               .dropout = o.lora_dropout,
               .rank_stabilised = o.lora_rslora};
  const std::string usual(row_of(model.family).usual_adapters);
  const std::string given = o.lora_targets.value_or(usual);
  if (given == "all") {
    for (const LoraTarget& t : lora_targets(model)) c.targets.emplace_back(t.name);
    return c;
  }
  for (size_t at = 0; at <= given.size();) {
    const size_t comma = std::min(given.find(',', at), given.size());
    c.targets.push_back(given.substr(at, comma - at));
    at = comma + 1;
  }
  return c;
}

ModelConfig model_of(const TrainOptions& o) {
  ModelConfig c = preset(o.model).value();
  const auto given = [](const auto& option, auto& field) {
    if (option) field = *option;
  };
  if (o.family) c.family = chosen<Family>(*o.family);
  given(o.layers, c.layers), given(o.heads, c.heads), given(o.channels, c.channels);
  given(o.context, c.context), given(o.vocab, c.vocab), given(o.norm_eps, c.norm_eps);
  given(o.head_dim, c.head_dim), given(o.ffn, c.ffn), given(o.qkv_bias, c.qkv_bias), given(o.qk_norm, c.qk_norm);
  if (o.heads && !o.kv_heads) c.kv_heads = 0;  // those of the preset are for its own heads
  if (o.channels && !o.ffn) c.ffn = 0;
  given(o.kv_heads, c.kv_heads);
  if (o.untied) c.tied = !*o.untied;
  given(o.rope_theta, c.rotary.theta), given(o.rope_factor, c.rotary.factor);
  if (o.rope_scaling) c.rotary.scaling = chosen<RopeScaling>(*o.rope_scaling);
  given(o.rope_low_freq, c.rotary.low_freq_factor), given(o.rope_high_freq, c.rotary.high_freq_factor);
  given(o.rope_original_context, c.rotary.original_context);
  given(o.experts, c.experts.count), given(o.experts_per_token, c.experts.per_token);
  given(o.shared_experts, c.experts.shared), given(o.expert_capacity, c.experts.capacity);
  given(o.balance_loss, c.experts.balance_loss), given(o.z_loss, c.experts.z_loss);
  if (o.router_softmax) c.experts.softmax = chosen<RouterSoftmax>(*o.router_softmax);
  c.dropout = o.dropout;
  c.recompute = recompute_of(o);
  if (o.lora_rank > 0) c.lora = lora_of(o, c);
  if (o.quantize) c.quantize.codec = chosen<Codec>(*o.quantize);
  given(o.quantize_group, c.quantize.group);
  return c;
}

Optimisation optimisation_of(const TrainOptions& o) {
  return {.optimizer = chosen<OptimizerKind>(o.optimizer),
          .momentum = o.momentum.value_or(o.optimizer == "muon" ? 0.95 : 0.9),
          .lr = o.lr,
          .min_lr = o.min_lr,
          .warmup = o.warmup,
          .steps = o.steps,
          .weight_decay = o.weight_decay,
          .beta1 = o.beta1,
          .beta2 = o.beta2,
          .clip = o.clip,
          .batch = o.batch,
          .seed = o.seed,
          .dtype = chosen<DType>(o.dtype),
          .state_dtype = chosen<DType>(o.state_dtype),
          .document_mask = o.document_mask || o.pack};
}

Backend backend_of(const TrainOptions& o) {
  if (o.launch) return Backend::threads;  // of the launcher, which starts the ranks as it is told
  if (o.backend) return chosen<Backend>(*o.backend);
  if (o.rendezvous) return Backend::tcp;
  return mpi_surroundings() ? Backend::mpi : Backend::threads;
}

// By an MPI job or --ranks; 0 when there is none.
int64_t given_ranks(const TrainOptions& o, const Plan& p) {
  if (!has_processes(p) || o.rendezvous) return o.ranks.value_or(0);
  const std::optional<MpiSurroundings> job = mpi_surroundings();
  return job ? job->ranks : 1;
}

void set_axes(const TrainOptions& o, Plan& p) {
  p.pp = o.pp.value_or(1), p.dp = o.dp.value_or(1), p.cp = o.cp.value_or(1), p.tp = o.tp.value_or(1);
  const int64_t ranks = given_ranks(o, p);
  if (ranks == 0) {
    const bool silent = !o.pp && !o.dp && !o.cp && !o.tp;
    if (silent && std::thread::hardware_concurrency() >= kDefaultRanks &&
        o.batch % (kDefaultRanks * o.microbatches) == 0)
      p.dp = kDefaultRanks;
    return;
  }
  std::vector<int64_t*> open;
  if (!o.dp) {
    open.push_back(&p.dp);
  } else {
    if (!o.pp) open.push_back(&p.pp);
    if (!o.cp) open.push_back(&p.cp);
    if (!o.tp) open.push_back(&p.tp);
  }
  if (open.size() == 1 && ranks % p.ranks() == 0) *open[0] = ranks / p.ranks();
}

Plan plan_of(const TrainOptions& o) {
  Plan p{.ep = o.ep,
         .sp = o.sp,
         .tie_copies = o.tie_copies,
         .zero = static_cast<ZeroStage>(o.zero),
         .shard_ranks = o.shard_ranks.value_or(0),
         .dp_mode = chosen<DataMode>(o.dp_mode),
         .sync_every = o.sync_every,
         .sync_fragments = o.sync_fragments,
         .outer_lr = o.outer_lr,
         .outer_momentum = o.outer_momentum,
         .servers = o.servers,
         .staleness = o.staleness,
         .record = o.record.value_or(""),
         .replay = o.replay.value_or(""),
         .bucket_mb = o.bucket_mb,
         .grad_dtype = chosen<DType>(o.grad_dtype),
         .all_reduce = chosen<Algorithm>(o.all_reduce),
         .offload = chosen<Offload>(o.offload),
         .chunks = o.chunks.value_or(0),
         .cp_mode = chosen<ContextMode>(o.cp_mode),
         .microbatches = o.microbatches,
         .recompute = recompute_of(o),
         .device = chosen<Device>(o.device),
         .backend = backend_of(o),
         .rendezvous = o.rendezvous.value_or(""),
         .cuda_graph = chosen<CudaGraph>(o.cuda_graph),
         .attention = chosen<AttentionKernels>(o.attention.value_or("auto")),
         .deterministic = o.deterministic,
         .threads_per_rank = o.threads_per_rank.value_or(0),
         .timeout = o.timeout};
  try {
    const NamedSchedule named = schedule_named(o.schedule);
    p.schedule = named.kind;
    p.schedule_file = named.file;
  } catch (const Error& e) {
    const std::string text = e.what();
    throw Error("--schedule: " + text.substr(text.find(']') + 2));
  }
  set_axes(o, p);
  return p;
}

void check_ranks(const TrainOptions& o, const Plan& p) {
  const int64_t ranks = given_ranks(o, p);
  if (has_processes(p) && o.ranks && *o.ranks != ranks)
    throw Error(fmt::format("--ranks: the job has {} ranks; expected that or no --ranks, found {}", ranks, *o.ranks));
  if (ranks == 0 || p.ranks() == ranks) return;
  const int64_t rest = p.ranks() / p.dp;
  const std::string nearest = ranks % rest == 0
                                  ? fmt::format("--dp {}", ranks / rest)
                                  : fmt::format("{} ranks", multiples_near(o.dp ? p.ranks() : rest, ranks));
  throw Error(
      fmt::format("--ranks: pp {} x dp {} x cp {} x tp {} makes {} ranks; expected {}; the nearest that can: {}", p.pp,
                  p.dp, p.cp, p.tp, p.ranks(), ranks, nearest));
}

}  // namespace

Job job_of(const TrainOptions& o) { return {model_of(o), optimisation_of(o), plan_of(o)}; }

LaunchOptions ranks_of(const std::string& command, const TrainOptions& o, const Plan& plan) {
  LaunchOptions how = launch_options(plan);
  how.shown = with_options;
  how.rank = static_cast<int>(o.rank.value_or(0));
  if (!has_processes(plan)) return how;
  how.same = all_values(o);
  std::erase_if(how.same, [](const auto& option) { return option.first == "rank"; });
  how.same.emplace_back("command", command);
  how.same.emplace_back("program", fmt::format("tessera {} ({:016x})", TESSERA_VERSION, checksum_of("/proc/self/exe")));
  return how;
}

void check_plan(const TrainOptions& o) {
  const Job s = job_of(o);
  try {
    Findings found;
    found.check([&] { check_backend(s.plan, std::max(o.ranks.value_or(1), s.plan.ranks())); });
    found.check([&] { check_ranks(o, s.plan); });
    found.check([&] { check(s, o.trace); });
    found.raise();
  } catch (const InputError& e) {
    throw_of_option("schedule", o.schedule, e);
  } catch (const Error& e) {
    throw_with_options(e);
  }
}

}  // namespace tessera
