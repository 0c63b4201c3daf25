// The checks, by topic; check() runs all of them.
#include "train/check.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

#include "base/error_list.h"
#include "base/setting.h"
#include "models/layout.h"
#include "parallel/comm/fake_transport.h"
#include "parallel/comm/launch.h"
#include "parallel/comm/nccl/transport.h"
#include "tensor/cuda/gpus.h"
#include "train/device.h"
#include "train/step_graph.h"

namespace tessera {

namespace {

template <class... Args>
[[noreturn]] void refuse(const char* field, fmt::format_string<Args...> format, Args&&... args) {
  throw FieldError(field, fmt::format(format, std::forward<Args>(args)...));
}

void check_ranges(Plan p) {
  Plan defaults;
  check_minimum(field_descriptors(p), field_descriptors(defaults));
  const auto positive = [](const char* field, double found) {
    if (!(found > 0) || !std::isfinite(found)) refuse(field, "expected a number above 0, got {}", found);
  };
  positive("bucket_mb", p.bucket_mb);
  positive("timeout", p.timeout);
}

void check_documents(const TrainConfig& s) {
  if (s.optim.document_mask && s.plan.dp_mode == DataMode::dataparallel)
    refuse("document_mask",
           "`dp_mode` dataparallel scatters tokens from rank 0 without document boundaries; expected `dp_mode` ddp, "
           "got dataparallel");
}

void check_float64(const TrainConfig& s) {
  if constexpr (kWithCuda)
    if (s.plan.device == Device::cuda && s.optim.dtype == DType::float64 && !cuda::has_float64_kernels())
      refuse(
          "dtype",
          "fp64 on a GPU requires a build with -DTESSERA_FLOAT64_KERNELS=ON; expected fp32 or bf16, or `device` cpu");
}

void check_state_dtype(const TrainConfig& s) {
  if (s.optim.state_dtype != DType::bfloat16) return;
  if (s.optim.dtype != DType::bfloat16)
    refuse("state_dtype", "bf16 requires `dtype` bf16, got {}; expected fp32", value_name(s.optim.dtype));
  if (s.plan.device != Device::cpu)
    refuse("state_dtype", "bf16 is supported only on `device` cpu; expected fp32, got bf16 on cuda");
}

void check_ranks(const TrainConfig& s) {
  const Plan& p = s.plan;
  if (has_processes(p) && p.rendezvous.empty() && !mpi_surroundings()) return;  // check_backend() expects a launcher
  const int64_t ranks = requested_ranks(s);
  if (s.ranks.value_or(ranks) != ranks)
    refuse("ranks", "expected {}, the size of the job, or no `ranks`; got {}", ranks, *s.ranks);
  if (ranks == 0 || p.ranks() == ranks) return;
  const int64_t rest = p.ranks() / p.dp;
  const std::string nearest = ranks % rest == 0 ? fmt::format("`dp` {}", ranks / rest)
                                                : fmt::format("{} ranks", multiples_near(p.ranks(), ranks));
  refuse("ranks", "pp {} x dp {} x cp {} x tp {} is {} ranks; expected {}; nearest valid value: {}", p.pp, p.dp, p.cp,
         p.tp, p.ranks(), ranks, nearest);
}

void check_batch(const Plan& p, int64_t batch) {
  const int64_t shards = p.dp * p.microbatches;
  if (batch % shards != 0)
    refuse("batch", "{} is not divisible by {} data ranks x {} micro-batches; nearest valid value: {}", batch, p.dp,
           p.microbatches, multiples_near(shards, batch));
}

void check_tensor(const Plan& p, const ModelConfig& m) {
  const auto shared = [&](int64_t heads, const char* what) {
    if (heads % p.tp != 0)
      refuse("tp", "{} does not divide the {} {}heads; nearest valid value: {}", p.tp, heads, what,
             divisors_near(heads, p.tp));
  };
  shared(m.heads, "");
  shared(m.all_heads().key, "key-value ");
  if (m.vocab > 0 && m.vocab < p.tp)
    refuse("tp", "a vocabulary of {} cannot be sharded over {} ranks; expected at most {}", m.vocab, p.tp, m.vocab);
  const int64_t tokens = m.context / p.cp;
  if (p.sp && tokens % p.tp != 0)
    refuse("sp", "{} ranks of `tp` do not divide the {} tokens per rank; nearest valid value: `tp` {}", p.tp, tokens,
           divisors_near(tokens, p.tp));
}

// What layout-invariant arithmetic does not support is refused, never computed in another order.
void check_layout_invariant(const TrainConfig& s) {
  const Plan& p = s.plan;
  const ModelConfig& m = s.model;
  if (!p.layout_invariant) return;
  const auto unsupported = [](bool found, const char* what) {
    if (found) refuse("layout_invariant", "{} is not supported", what);
  };
  unsupported(p.device != Device::cpu, "`device` cuda");
  unsupported(p.cp > 1, "context parallelism (`cp`)");
  unsupported(m.experts.count > 0, "a mixture of experts");
  unsupported(m.lora.rank > 0, "training of adapters (`lora_rank`)");
  unsupported(m.quantize.codec != Codec::none, "a model with 4-bit weights");
  unsupported(m.qk_norm, "normalization of queries and keys (`qk_norm`)");
  unsupported(p.grad_dtype == DType::bfloat16, "`grad_dtype` bf16");
  unsupported(find_row(s.optim.optimizer).updates_matrices, "an optimizer of full matrices (muon)");
  if (p.dp_mode != DataMode::ddp) refuse("layout_invariant", "requires `dp_mode` ddp, got {}", value_name(p.dp_mode));
  if (p.all_reduce != Algorithm::direct)
    refuse("layout_invariant", "requires `all_reduce` direct, got {}", value_name(p.all_reduce));
  if (p.tp > kLeaves || kLeaves % p.tp != 0)
    refuse("layout_invariant", "{} leaves cannot be divided among {} ranks of `tp`; nearest valid value: {}", kLeaves,
           p.tp, divisors_near(kLeaves, p.tp));
  const auto divisible = [&](int64_t size, const char* what) {
    if (size % p.tp != 0)
      refuse("layout_invariant", "requires equal shards, and {} ranks of `tp` do not divide the {} {}", p.tp, size,
             what);
  };
  divisible(m.vocab, "entries of the vocabulary");
  divisible(m.hidden(), "hidden channels");
  if (p.sp && m.context % (2 * p.tp) != 0)
    refuse("layout_invariant",
           "with `sp` each sequence has 2 chunks for each rank of `tp`, and {} chunks do not divide the {} tokens",
           2 * p.tp, m.context);
}

void check_context(const Plan& p, const ModelConfig& m) {
  if (p.cp == 1) return;
  const bool ring = p.cp_mode == ContextMode::ring;
  const int64_t chunks = ring ? 2 * p.cp : p.cp;  // the ring assigns two chunks to each rank
  if (m.context % chunks != 0)
    refuse("cp",
           "{} ranks require a `context` divisible into equal chunks, got {} tokens for {} chunks; nearest valid "
           "`context`: {}",
           p.cp, m.context, chunks, multiples_near(chunks, m.context));
  if (ring) return;
  const auto shared = [&](int64_t heads, const char* what) {
    if (heads % p.cp != 0)
      refuse("cp", "{} ranks of `cp_mode` ulysses do not divide the {} {}heads per rank; nearest valid value: {}", p.cp,
             heads, what, divisors_near(heads, p.cp));
  };
  shared(m.heads / p.tp, "");
  shared(m.all_heads().key / p.tp, "key-value ");
}

void check_chunks(const Plan& p) {
  if (p.chunks > 0 && (!p.schedule_file.empty() || p.schedule != ScheduleKind::interleaved))
    refuse("chunks", "requires `schedule` interleaved, got {}", schedule_name(p));
}

void check_pipeline(const Plan& p, const ModelConfig& m) {
  check_chunks(p);
  const int stages = make_schedule(p).stages;
  if (stages > m.layers)
    refuse("pp", "{} ranks have {} stages, more than the {} layers; expected at most {} stages, as with `pp` {}", p.pp,
           stages, m.layers, m.layers, std::max<int64_t>(m.layers * p.pp / stages, 1));
}

// Partitions one layer for each tp rank, using fake ranks.
void check_quantized(const TrainConfig& s) {
  if (s.model.quantize.codec == Codec::none) return;
  ModelConfig one = s.model;
  one.layers = 1;
  one.vocab = std::max<int64_t>(one.vocab, s.plan.tp);
  for (int64_t rank = 0; s.plan.tp > 1 && rank < s.plan.tp; ++rank) {
    Communicator axis(std::make_unique<FakeTransport>(static_cast<int>(rank), static_cast<int>(s.plan.tp)), "tp");
    build_model(s.make, one)->place({.tp = &axis, .between = s.plan.sp ? S(1, one.context / s.plan.cp) : I});
  }
}

void check_trace(const Plan& p, bool traced) {
  if (traced && p.dp_mode == DataMode::ps_async) refuse("trace", "requires synchronous steps, got `dp_mode` ps-async");
}

void check_place(const TrainConfig& s, bool traced) {
  const Plan& p = s.plan;
  check_attention(p);
  check_device(p.device);
  no_graph_because(s, traced);
  if (p.device == Device::cpu) return;
  if (p.all_reduce == Algorithm::native && !uses_nccl(p))
    refuse("all_reduce", "MPI reduces only arrays in host memory; expected {}", expected_algorithms());
}

// NCCL chooses its own reduction order and requires one GPU per rank.
void check_nccl(const Plan& p) {
  if (!uses_nccl(p)) {
    if (const std::string pair = has_processes(p) ? "" : gpus_apart(p); !pair.empty())
      refuse("backend", "{} have no peer access, which thread ranks require; expected nccl with `all_reduce` native",
             pair);
    return;
  }
  if (p.device != Device::cuda)
    refuse("backend", "nccl requires ranks on GPUs; expected `device` cuda, got {}", to_string(p.device));
  if (p.all_reduce != Algorithm::native)
    refuse("backend", "nccl determines the summation order; expected `all_reduce` native, got {}",
           value_name(p.all_reduce));
  if (!has_processes(p) && p.ranks() > gpu_count())
    refuse("backend",
           "nccl requires one GPU for each of {} ranks, and this machine has {}; other backends let ranks share a GPU",
           p.ranks(), gpu_count());
}

void check_diloco(const Plan& p) {
  if (p.dp_mode != DataMode::diloco) return;
  if (p.sync_fragments > p.sync_every)
    refuse(
        "sync_fragments",
        "each fragment is synchronized at a different one of the {} steps (`sync_every`); expected at most {}, got {}",
        p.sync_every, p.sync_every, p.sync_fragments);
  if (p.zero != ZeroStage::none)
    refuse("zero", "`dp_mode` diloco does not shard state between synchronizations; expected 0, got {}",
           value_name(p.zero));
  if (!find_row(p.all_reduce).adds_uniformly() && (p.pp > 1 || p.tie_copies || p.tp > 1))
    refuse("all_reduce",
           "a {} may sum replicas on pipeline or tensor ranks in different orders, and `dp_mode` diloco does not "
           "resynchronize them; expected {}{}",
           p.all_reduce == Algorithm::native ? "library" : to_string(p.all_reduce), expected_algorithms(true),
           uses_nccl(p) ? ", and `backend` threads or mpi" : "");
  if (!(p.outer_lr > 0) || !std::isfinite(p.outer_lr))
    refuse("outer_lr", "expected a number above 0, got {}", p.outer_lr);
  if (!(p.outer_momentum >= 0 && p.outer_momentum < 1))
    refuse("outer_momentum", "expected a number in [0, 1), got {}", p.outer_momentum);
}

void check_offload(const Plan& p) {
  if (p.offload != Offload::parameters) return;
  if (p.zero != ZeroStage::three)
    refuse("offload", "parameters requires `zero` 3, because it moves the shards; got `zero` {}", value_name(p.zero));
  if (p.device == Device::cpu)
    refuse("offload",
           "parameters are offloaded to host memory, where `device` cpu already stores them; a mapped file would save "
           "nothing, since every pass reads them; expected `device` cuda, got cpu");
}

void check_updates(const TrainConfig& s) {
  const OptimizerRow& row = find_row(s.optim.optimizer);
  const DataMode mode = s.plan.dp_mode;
  if (row.updates_matrices && (mode == DataMode::ps_sync || mode == DataMode::ps_async))
    refuse("optimizer",
           "{} requires full matrices, which servers of {} do not hold; expected a different optimizer, or `dp_mode` "
           "ddp",
           row.name, value_name(mode));
  if (row.updates_matrices && s.model.lora.rank > 0)
    refuse("optimizer",
           "{} updates the weight matrices of the layers, which are frozen when training adapters; expected adamw",
           row.name);
  if (row.updates_matrices && s.optim.state_dtype == DType::bfloat16)
    refuse("state_dtype", "{} requires fp32 momentum; expected fp32, got bf16", row.name);
  if (s.plan.sync_fragments > s.model.layers)
    refuse("sync_fragments", "each fragment has at least one of the {} layers; expected at most {}, got {}",
           s.model.layers, s.model.layers, s.plan.sync_fragments);
}

void check_data(const Plan& p) {
  if (p.all_reduce == Algorithm::native && !uses_nccl(p) && p.backend != Backend::mpi)
    refuse("all_reduce", "{} ranks have no native all-reduce; expected {}",
           p.backend == Backend::tcp ? "TCP" : "thread", expected_algorithms());
  if (p.shard_ranks > 0 && p.zero == ZeroStage::none) refuse("shard_ranks", "requires `zero` 1, 2 or 3, got 0");
  if (p.shard_ranks > 0 && (p.dp * p.cp) % p.shard_ranks != 0)
    refuse("shard_ranks", "groups of {} ranks do not divide the {} data ranks; nearest valid value: {}", p.shard_ranks,
           p.dp * p.cp, divisors_near(p.dp * p.cp, p.shard_ranks));
  if (p.dp_mode == DataMode::ddp || p.dp_mode == DataMode::diloco) return;
  if (p.servers > p.dp) refuse("servers", "expected at most the number of ranks, {}, got {}", p.dp, p.servers);
  const std::string_view mode = value_name(p.dp_mode);
  if (uses_nccl(p))
    refuse("backend",
           "{} reduces on one rank, in rank order, which nccl does not support; expected threads or mpi with `dp_mode` "
           "{}, got nccl",
           mode, mode);
  if (p.all_reduce != Algorithm::direct)
    refuse("all_reduce", "{} reduces on one rank, in rank order; expected direct, got {}", mode,
           value_name(p.all_reduce));
  if (p.zero != ZeroStage::none) refuse("zero", "{} requires `dp_mode` ddp, got {}", value_name(p.zero), mode);
  if (p.ranks() > p.dp)
    refuse("dp_mode", "{} supports only data-parallel ranks; expected ddp with `tp`, `pp` and `cp`", mode);
}

void check_modes(const Plan& p) {
  Plan given = p, defaults;
  check_read(field_descriptors(given), field_descriptors(defaults));  // settings used by only one mode
  check_diloco(p);
  check_offload(p);
  if (p.recompute == Recompute::op)
    refuse("recompute",
           "op is supported only by `plan` for other frameworks; expected none, activation, activation+norm, attention "
           "or block, got op");
  if (p.dp_mode == DataMode::ps_async && p.tie_copies)
    refuse("tie_copies", "ps-async has no synchronized steps; expected a different `dp_mode`");
  if (p.dp_mode == DataMode::dataparallel && has_processes(p))
    refuse("dp_mode", "dataparallel supports only one process; expected ddp or ps-sync for several");
}

void check_experts(const Plan& p, const ModelConfig& m) {
  const int64_t experts = m.experts.count;
  if (experts == 0 && p.ep > 1) refuse("ep", "a model without experts requires 1, got {}", p.ep);
  if (experts == 0 || p.ep == 1) return;
  if (const int64_t data = p.dp * p.cp; data % p.ep != 0)
    refuse("ep", "the {} data ranks are not divisible by {}; nearest valid value: {}", data, p.ep,
           divisors_near(data, p.ep));
  if (experts % p.ep != 0)
    refuse("ep", "{} ranks do not divide the {} experts; nearest valid value: {}", p.ep, experts,
           divisors_near(experts, p.ep));
  if (p.shard_ranks % p.ep != 0)
    refuse("shard_ranks",
           "each group holds all experts, sharded over {} ranks of `ep`; expected a multiple of {}, got {}", p.ep, p.ep,
           p.shard_ranks);
  if (p.dp_mode != DataMode::ddp) refuse("ep", "requires `dp_mode` ddp, got {}", value_name(p.dp_mode));
  if (!find_row(p.all_reduce).adds_uniformly() && p.all_reduce != Algorithm::native)
    refuse("all_reduce",
           "a {}'s summation order depends on positions in the buffer, which differ between ranks of `ep`; expected {}",
           to_string(p.all_reduce), expected_algorithms(true));
}

void check_model(const TrainConfig& s) {
  const ModelConfig& m = s.model;
  if (m.head_dim == 0 && m.channels % m.heads != 0)
    refuse("heads", "{} heads do not divide {} channels; nearest valid value: {}", m.heads, m.channels,
           divisors_near(m.channels, m.heads));
  if (m.heads % m.all_heads().key != 0)
    refuse("kv_heads", "{} does not divide the {} heads; nearest valid value: {}", m.kv_heads, m.heads,
           divisors_near(m.heads, m.kv_heads));
  ModelConfig one = m;  // the model rejects unsupported features; one layer is representative
  one.layers = 1;
  one.vocab = std::max<int64_t>(m.vocab, 1);
  build_model(s.make, one);
}

void check_adapters(const TrainConfig& s) {
  const LoraConfig &lora = s.model.lora, none;
  for (const auto& [field, set] : {std::pair{"lora_alpha", lora.alpha != none.alpha},
                                   {"lora_dropout", lora.dropout != none.dropout},
                                   {"lora_rslora", lora.rank_stabilised},
                                   {"lora_targets", !lora.targets.empty()}})
    if (set && lora.rank == 0) refuse(field, "requires `lora_rank`");
  if (lora.rank > 0 && s.plan.dp_mode == DataMode::ps_async)
    refuse("lora_rank", "not supported with `dp_mode` ps-async, which would also update the frozen weights");
}

void check_frozen_weights(const ModelConfig& m) {
  const Codec codec = m.quantize.codec;
  if (codec != Codec::gptq && m.quantize.group != QuantizeConfig().group)
    refuse("quantize_group", "requires `quantize` gptq, got {}", value_name(codec));
  if (codec != Codec::none && m.lora.rank == 0)
    refuse("quantize", "{} requires `lora_rank`, because 4-bit weights are frozen", value_name(codec));
}

// Each contradiction is a separate error.
void check_run(const TrainConfig& s) {
  ErrorList found;
  const auto refuse_if = [&](bool wrong, const char* field, const std::string& message) {
    if (wrong) found.check([&] { throw FieldError(field, message); });
  };
  const RunConfig& run = s.run;
  const bool asynchronous = s.plan.dp_mode == DataMode::ps_async, never = run.eval_every == 0 && run.eval_fraction == 0;
  const double min_lr = s.optim.min_lr.value_or(0);
  refuse_if(min_lr > s.optim.lr, "min_lr", fmt::format("expected at most `lr` ({}), got {}", s.optim.lr, min_lr));
  refuse_if(run.epochs.value_or(1) <= 0, "epochs", "expected more than 0, got 0");
  refuse_if(s.data.held.fraction <= 0, "val_share", "expected more than 0, got 0");
  refuse_if(run.patience > 0 && (run.no_eval || never || asynchronous), "patience",
            fmt::format("requires periodic validation, got {}", run.no_eval ? "`no_eval`"
                                                                : never     ? "`eval_every` 0"
                                                                            : "`dp_mode` ps-async"));
  refuse_if(run.check_replicas > 0 && asynchronous, "check_replicas",
            "requires replicas that are identical after each step, got `dp_mode` ps-async");
  refuse_if(run.resume && !run.out, "resume", "requires `out` DIR, the run to resume");
  refuse_if(run.resume && run.no_save, "resume",
            "cannot be combined with `no_save` (an option, or a key in the run's config.toml)");
  found.raise();
}

void check_microbatches(const TrainConfig& s) {
  if (s.optim.batch % s.plan.microbatches != 0)
    refuse("microbatches", "{} does not divide the batch size, {}; nearest valid value: {}", s.plan.microbatches,
           s.optim.batch, divisors_near(s.optim.batch, s.plan.microbatches));
}

}  // namespace

void check_schedule_name(const Plan& p) {
  try {
    schedule_named(schedule_name(p));
  } catch (const Error& e) {
    const std::string text = e.what();
    refuse("schedule", "{}", text.substr(text.find(']') + 2));
  }
}

int64_t requested_ranks(const TrainConfig& s) {
  if (!has_processes(s.plan) || !s.plan.rendezvous.empty()) return s.ranks.value_or(0);
  const std::optional<MpiSurroundings> job = mpi_surroundings();
  return job ? job->ranks : 1;
}

void check_sizes(const TrainConfig& s) {
  ErrorList found;
  found.check([&] { check_model(s); });
  found.check([&] { check_microbatches(s); });
  found.raise();
}

// Backends may be unavailable, depending on the process launcher.
void check_backend(const Plan& p, int64_t ranks) {
  const bool uses_rendezvous = p.backend == Backend::tcp || p.backend == Backend::nccl;
  if (!p.rendezvous.empty() && !uses_rendezvous)
    refuse("rendezvous", "requires `backend` tcp or nccl, got {}", value_name(p.backend));
  if (p.backend == Backend::tcp && p.rendezvous.empty())
    refuse("backend", "tcp requires an address for the rendezvous; expected `rendezvous` HOST:PORT");
  if (!p.rendezvous.empty()) return;
  const std::optional<MpiSurroundings> job = mpi_surroundings();
  if (const int tasks = unlinked_tasks(); tasks > 0)
    refuse("backend",
           "srun started {} tasks without a PMI, so each would be a separate run; expected one task, a PMI (pmix or "
           "pmi2) that connects them, or `rendezvous` and `rank`",
           tasks);
  if (!has_processes(p) && job && job->ranks > 1)
    refuse("backend",
           "{} started {} processes, each of which would be a separate run; expected mpi, or one process, got threads",
           job->launcher, job->ranks);
  if (has_processes(p) && !job && ranks > 1)
    refuse("backend", "mpi requires a start by mpirun; expected mpirun -n {} before tessera, or `backend` threads",
           ranks);
}

void check_layout(const Plan& p, const ModelConfig& m, int64_t batch) {
  check_ranges(p);
  check_batch(p, batch);
  check_tensor(p, m);
  check_context(p, m);
  check_experts(p, m);
}

void check(const Plan& p) {
  if constexpr (kWithNccl)
    if (uses_nccl(p)) prepare_for_nccl();  // before the first CUDA call, which enumerates GPUs
  check_ranges(p);
  check_backend(p, p.ranks());
  check_data(p);
  check_modes(p);
  check_chunks(p);
  make_schedule(p);
  check_place(TrainConfig{.plan = p}, false);
  check_nccl(p);
}

void check_trainer(const TrainConfig& given, bool traced) {
  TrainConfig s = given;
  Plan& p = s.plan;
  if constexpr (kWithNccl)
    if (uses_nccl(p)) prepare_for_nccl();
  check_ranges(p);  // other checks divide by them
  ErrorList found;
  found.check([&] { check_schedule_name(p); });
  if (!found.none()) p.schedule_file.clear();  // the other checks use the default schedule
  found.check([&] { check_ranks(s); });
  found.check([&] { check_sizes(s); });
  found.check([&] { check_backend(p, std::max(s.ranks.value_or(1), p.ranks())); });
  found.check([&] { check_documents(s); });
  found.check([&] { check_float64(s); });
  found.check([&] { check_state_dtype(s); });
  found.check([&] { check_updates(s); });
  found.check([&] { check_data(p); });
  found.check([&] { check_modes(p); });
  if (s.optim.batch % p.microbatches == 0) found.check([&] { check_batch(p, s.optim.batch); });
  found.check([&] { check_tensor(p, s.model); });
  found.check([&] { check_context(p, s.model); });
  found.check([&] { check_layout_invariant(s); });
  found.check([&] { check_experts(p, s.model); });
  found.check([&] { check_pipeline(p, s.model); });
  found.check([&] { check_quantized(s); });
  found.check([&] { check_bfloat16(s); });
  found.check([&] { check_attention(s); });
  found.check([&] { check_trace(p, traced); });
  found.check([&] { check_place(s, traced); });
  found.check([&] { check_nccl(p); });
  found.raise();
}

void check(const TrainConfig& s, bool traced) {
  ErrorList found;
  found.check([&] { check_trainer(s, traced); });
  found.check([&] { check_adapters(s); });
  found.check([&] { check_frozen_weights(s.model); });
  found.check([&] { check_run(s); });
  found.raise();
}

}  // namespace tessera
