// Plans that cannot be are refused before anything starts, with the field at fault and the nearest value that can be.
#include <fmt/format.h>

#include "models/layout.h"
#include "parallel/comm/fake_transport.h"
#include "parallel/comm/launch.h"
#include "parallel/comm/nccl/transport.h"
#include "settings/setting.h"
#include "tensor/cuda/gpus.h"
#include "tensor/findings.h"
#include "train/device.h"
#include "train/step.h"

namespace tessera {

namespace {

template <class... Args>
[[noreturn]] void refuse(const char* field, fmt::format_string<Args...> words, Args&&... args) {
  throw FieldError(field, fmt::format(words, std::forward<Args>(args)...));
}

void check_numbers(Plan p) {
  Plan usual;
  check_least(field_descriptors(p), field_descriptors(usual));
  const auto positive = [](const char* field, double found) {
    if (!(found > 0) || !std::isfinite(found)) refuse(field, "expected a number above 0, found {}", found);
  };
  positive("bucket_mb", p.bucket_mb);
  positive("timeout", p.timeout);
}

void check_documents(const Job& s) {
  if (s.optim.document_mask && s.plan.dp_mode == DataMode::dataparallel)
    refuse(
        "document_mask",
        "the ranks of `dp_mode` dataparallel get their tokens from rank 0, and it does not send where documents begin; "
        "expected `dp_mode` ddp, found dataparallel");
}

// Before anything is read or queued.
void check_float64(const Job& s) {
  if constexpr (kWithCuda)
    if (s.plan.device == Device::cuda && s.optim.dtype == DType::float64 && !cuda::has_float64_kernels())
      refuse("dtype",
             "fp64 on a GPU takes a build with -DTESSERA_FLOAT64_KERNELS=ON; expected fp32 or bf16, or "
             "`device` cpu");
}

void check_state_dtype(const Job& s) {
  if (s.optim.state_dtype != DType::bfloat16) return;
  if (s.optim.dtype != DType::bfloat16)
    refuse("state_dtype", "bf16 is for parameters of `dtype` bf16, which are {}; expected fp32",
           value_name(s.optim.dtype));
  if (s.plan.device != Device::cpu)
    refuse("state_dtype", "bf16 is built for `device` cpu alone; expected fp32, found bf16 on cuda");
}

void check_batch(const Plan& p, int64_t batch) {
  const int64_t parts = p.dp * p.microbatches;
  if (batch % parts != 0)
    refuse("batch", "{} sequences cannot be cut evenly into {} data ranks x {} micro-batches; the nearest that can: {}",
           batch, p.dp, p.microbatches, multiples_near(parts, batch));
}

void check_tensor(const Plan& p, const ModelConfig& m) {
  const auto shared = [&](int64_t heads, const char* what) {
    if (heads % p.tp != 0)
      refuse("tp", "{} does not divide the {} heads{}; the nearest that does: {}", p.tp, heads, what,
             divisors_near(heads, p.tp));
  };
  shared(m.heads, "");
  shared(m.all_heads().key, " of keys and values");
  if (m.vocab > 0 && m.vocab < p.tp)
    refuse("tp", "a vocabulary of {} has no row for each of {} ranks; expected at most {}", m.vocab, p.tp, m.vocab);
  const int64_t tokens = m.context / p.cp;
  if (p.sp && tokens % p.tp != 0)
    refuse("sp", "{} ranks of `tp` do not divide the {} tokens that each has; the nearest that does: `tp` {}", p.tp,
           tokens, divisors_near(tokens, p.tp));
}

void check_context(const Plan& p, const ModelConfig& m) {
  if (p.cp == 1) return;
  const bool ring = p.cp_mode == ContextMode::ring;
  const int64_t parts = ring ? 2 * p.cp : p.cp;  // the ring deals out two chunks to each
  if (m.context % parts != 0)
    refuse("cp", "{} ranks cut a context of {} into {} parts; the nearest `context` that can be cut: {}", p.cp,
           m.context, parts, multiples_near(parts, m.context));
  if (ring) return;
  const auto shared = [&](int64_t heads, const char* what) {
    if (heads % p.cp != 0)
      refuse("cp",
             "{} ranks of `cp_mode` ulysses do not divide the {} heads{} that each has; the nearest that does: {}",
             p.cp, heads, what, divisors_near(heads, p.cp));
  };
  shared(m.heads / p.tp, "");
  shared(m.all_heads().key / p.tp, " of keys and values");
}

void check_chunks(const Plan& p) {
  if (p.chunks > 0 && (!p.schedule_file.empty() || p.schedule != ScheduleKind::interleaved))
    refuse("chunks", "goes with `schedule` interleaved, found {}", schedule_name(p));
}

void check_pipeline(const Plan& p, const ModelConfig& m) {
  check_chunks(p);
  const int stages = make_schedule(p).stages;
  if (stages > m.layers)
    refuse("pp", "{} ranks make {} stages, more than the {} layers; expected at most {} stages, as of `pp` {}", p.pp,
           stages, m.layers, m.layers, std::max<int64_t>(m.layers * p.pp / stages, 1));
}

// As the model lays one layer out on each rank of tp, beside ranks that are not there.
void check_quantized(const Job& s) {
  if (s.model.quantize.codec == Codec::none) return;
  ModelConfig one = s.model;
  one.layers = 1;
  one.vocab = std::max<int64_t>(one.vocab, s.plan.tp);
  for (int64_t rank = 0; s.plan.tp > 1 && rank < s.plan.tp; ++rank) {
    Communicator axis(std::make_unique<FakeTransport>(static_cast<int>(rank), static_cast<int>(s.plan.tp)), "tp");
    build_model(s.make, one)->place({.tp = &axis, .between = s.plan.sp ? S(1, one.context / s.plan.cp) : I});
  }
}

void check_place(const Job& s, bool traced) {
  const Plan& p = s.plan;
  check_attention(p);
  check_device(p.device);
  no_graph_because(s, traced);
  if (p.device == Device::cpu) return;
  if (p.all_reduce == Algorithm::native && !uses_nccl(p))
    refuse("all_reduce", "MPI can sum only arrays in the host's memory; expected direct, ring, tree or root");
}

// NCCL has one order of sums, its own, and no GPU for a second rank.
void check_nccl(const Plan& p) {
  if (!uses_nccl(p)) {
    if (const std::string pair = has_processes(p) ? "" : gpus_apart(p); !pair.empty())
      refuse("backend",
             "{} do not reach each other's memory, which ranks that are threads use; expected nccl, beside "
             "`all_reduce` native",
             pair);
    return;
  }
  if (p.device != Device::cuda)
    refuse("backend", "nccl is for ranks on GPUs; expected `device` cuda beside it, found {}", to_string(p.device));
  if (p.all_reduce != Algorithm::native)
    refuse("backend", "nccl adds in an order of its own; expected `all_reduce` native beside it, found {}",
           value_name(p.all_reduce));
  if (!has_processes(p) && p.ranks() > gpu_count())
    refuse("backend",
           "nccl wants a GPU for each of {} ranks, and this machine has {}; without it ranks share "
           "one",
           p.ranks(), gpu_count());
}

// The data axis: its modes, groups of shards, ranks that train alone, and optimizers that need whole matrices.

void check_diloco(const Plan& p) {
  if (p.dp_mode != DataMode::diloco) return;
  if (p.sync_fragments > p.sync_every)
    refuse("sync_fragments",
           "each fragment makes its outer steps in other steps, of which there are {} (`sync_every`); expected at most "
           "{}, found {}",
           p.sync_every, p.sync_every, p.sync_fragments);
  if (p.zero != ZeroStage::none)
    refuse("zero", "ranks of `dp_mode` diloco have nothing to share out between two sums; expected 0, found {}",
           value_name(p.zero));
  const bool in_any_order = p.all_reduce == Algorithm::ring || p.all_reduce == Algorithm::native;
  if (in_any_order && (p.pp > 1 || p.tie_copies || p.tp > 1))
    refuse("all_reduce",
           "{} may add what pipeline ranks or tensor ranks have copies of in several orders, and in `dp_mode` diloco "
           "nothing makes them equal again; expected direct, tree or root{}",
           p.all_reduce == Algorithm::ring ? "a ring" : "a library",
           uses_nccl(p) ? ", and `backend` threads or mpi" : "");
  if (!(p.outer_lr > 0) || !std::isfinite(p.outer_lr))
    refuse("outer_lr", "expected a number above 0, found {}", p.outer_lr);
  if (!(p.outer_momentum >= 0 && p.outer_momentum < 1))
    refuse("outer_momentum", "expected a number in [0, 1), found {}", p.outer_momentum);
}

void check_offload(const Plan& p) {
  if (p.offload != Offload::parameters) return;
  if (p.zero != ZeroStage::three)
    refuse("offload", "parameters moves the shards of `zero` 3; expected `zero` 3 beside it, found {}",
           value_name(p.zero));
  if (p.device == Device::cpu)
    refuse("offload",
           "parameters moves them to the host's memory. With `device` cpu they lie there already, and a mapped file "
           "would save nothing, since every pass reads them; expected `device` cuda beside it, found cpu");
}

void check_updates(const Job& s) {
  const bool muon = s.optim.optimizer == OptimizerKind::muon;
  const DataMode mode = s.plan.dp_mode;
  if (muon && (mode == DataMode::ps_sync || mode == DataMode::ps_async))
    refuse("optimizer",
           "muon needs whole matrices, which the servers of {} have not; expected another, or `dp_mode` ddp",
           value_name(mode));
  if (muon && s.model.lora.rank > 0)
    refuse("optimizer", "muon is for matrices of layers, which are frozen beside adapters; expected adamw");
  if (muon && s.optim.state_dtype == DType::bfloat16)
    refuse("state_dtype", "muon keeps its momentum in fp32; expected fp32, found bf16");
  if (s.plan.sync_fragments > s.model.layers)
    refuse("sync_fragments", "a fragment has at least one of the {} layers; expected at most {}, found {}",
           s.model.layers, s.model.layers, s.plan.sync_fragments);
}

void check_data(const Plan& p) {
  if (p.all_reduce == Algorithm::native && !uses_nccl(p) && p.backend != Backend::mpi)
    refuse("all_reduce", "{} ranks have no library of their own; expected direct, ring, tree or root",
           p.backend == Backend::tcp ? "TCP" : "thread");
  if (p.shard_ranks > 0 && p.zero == ZeroStage::none) refuse("shard_ranks", "goes with `zero` 1, 2 or 3, found 0");
  if (p.shard_ranks > 0 && (p.dp * p.cp) % p.shard_ranks != 0)
    refuse("shard_ranks", "groups of {} ranks do not divide the {} that share the batch; the nearest that do: {}",
           p.shard_ranks, p.dp * p.cp, divisors_near(p.dp * p.cp, p.shard_ranks));
  if (p.dp_mode == DataMode::ddp || p.dp_mode == DataMode::diloco) return;
  if (p.servers > p.dp) refuse("servers", "expected at most the {} ranks, found {}", p.dp, p.servers);
  const std::string_view mode = value_name(p.dp_mode);
  if (uses_nccl(p))
    refuse("backend",
           "{} adds at one rank, in rank order, and nccl does not; expected threads or mpi beside `dp_mode` {}, found "
           "nccl",
           mode, mode);
  if (p.all_reduce != Algorithm::direct)
    refuse("all_reduce", "{} adds at one rank, in rank order; expected direct, found {}", mode,
           value_name(p.all_reduce));
  if (p.zero != ZeroStage::none) refuse("zero", "{} goes with `dp_mode` ddp, found {}", value_name(p.zero), mode);
  if (p.ranks() > p.dp)
    refuse("dp_mode", "{} is for data-parallel ranks alone; expected ddp beside `tp`, `pp` and `cp`", mode);
}

void check_modes(const Plan& p) {
  Plan given = p, usual;
  check_read(field_descriptors(given), field_descriptors(usual));  // settings that only one mode reads
  check_diloco(p);
  check_offload(p);
  if (p.recompute == Recompute::op)
    refuse("recompute", "op is a way of other software, for predictions alone; expected block or another, found op");
  if (p.dp_mode == DataMode::ps_async && p.tie_copies)
    refuse("tie_copies", "ps-async has no steps in common; expected another `dp_mode`");
  if (p.dp_mode == DataMode::dataparallel && has_processes(p))
    refuse("dp_mode", "dataparallel is one process by definition; expected ddp or ps-sync for several");
}

void check_experts(const Plan& p, const ModelConfig& m) {
  const int64_t experts = m.experts.count;
  if (experts == 0 && p.ep > 1)
    refuse("ep", "a model without experts has none to share out; expected 1, found {}", p.ep);
  if (experts == 0 || p.ep == 1) return;
  if (const int64_t data = p.dp * p.cp; data % p.ep != 0)
    refuse("ep", "it is cut out of the {} data ranks, which {} does not divide; the nearest that does: {}", data, p.ep,
           divisors_near(data, p.ep));
  if (experts % p.ep != 0)
    refuse("ep", "{} ranks do not divide the {} experts; the nearest that does: {}", p.ep, experts,
           divisors_near(experts, p.ep));
  if (p.shard_ranks % p.ep != 0)
    refuse("shard_ranks",
           "each group has all experts, which {} ranks of `ep` share out; expected a multiple of {}, found {}", p.ep,
           p.ep, p.shard_ranks);
  if (p.dp_mode != DataMode::ddp) refuse("ep", "goes with `dp_mode` ddp, found {}", value_name(p.dp_mode));
  if (p.all_reduce == Algorithm::ring)
    refuse("all_reduce",
           "a ring adds in an order of places, which differ between ranks beside `ep`; expected direct, tree or root");
}

void check_model(const Job& s) {
  const ModelConfig& m = s.model;
  if (m.head_dim == 0 && m.channels % m.heads != 0)
    refuse("heads", "{} heads do not divide {} channels; the nearest that does: {}", m.heads, m.channels,
           divisors_near(m.channels, m.heads));
  if (m.heads % m.all_heads().key != 0)
    refuse("kv_heads", "{} do not divide the {} heads; the nearest that does: {}", m.kv_heads, m.heads,
           divisors_near(m.heads, m.kv_heads));
  ModelConfig one = m;  // the model says what it does not take; one layer has what every other has
  one.layers = 1;
  one.vocab = std::max<int64_t>(m.vocab, 1);
  build_model(s.make, one);
}

void check_microbatches(const Job& s) {
  if (s.optim.batch % s.plan.microbatches != 0)
    refuse("microbatches", "{} do not divide a batch of {}; the nearest that does: {}", s.plan.microbatches,
           s.optim.batch, divisors_near(s.optim.batch, s.plan.microbatches));
}

}  // namespace

void check_sizes(const Job& s) {
  ErrorList found;
  found.check([&] { check_model(s); });
  found.check([&] { check_microbatches(s); });
  found.raise();
}

// A backend is a wish; what started this process may not be able to fulfil it.
void check_backend(const Plan& p, int64_t ranks) {
  const bool may_meet = p.backend == Backend::tcp || p.backend == Backend::nccl;
  if (!p.rendezvous.empty() && !may_meet)
    refuse("rendezvous", "expected `backend` tcp or nccl beside it, found {}", value_name(p.backend));
  if (p.backend == Backend::tcp && p.rendezvous.empty())
    refuse("backend", "tcp wants an address where the ranks meet; expected `rendezvous` HOST:PORT beside it");
  if (!p.rendezvous.empty()) return;
  const std::optional<MpiSurroundings> job = mpi_surroundings();
  if (const int tasks = lone_tasks(); tasks > 0)
    refuse("backend",
           "srun has started {} tasks that cannot join each other, so each would be a separate run; expected "
           "one task, a PMI (pmix or pmi2) with which srun can join them, or `rendezvous` and `rank`",
           tasks);
  if (!has_processes(p) && job && job->ranks > 1)
    refuse("backend",
           "{} has started {} processes, and each would be a separate run; expected mpi, "
           "or one process, found threads",
           job->launcher, job->ranks);
  if (has_processes(p) && !job && ranks > 1)
    refuse("backend",
           "mpi takes its ranks from mpirun, which did not start this process; expected "
           "mpirun -n {} in front of tessera, or `backend` threads",
           ranks);
}

void check_layout(const Plan& p, const ModelConfig& m, int64_t batch) {
  check_numbers(p);
  check_batch(p, batch);
  check_tensor(p, m);
  check_context(p, m);
  check_experts(p, m);
}

void check(const Plan& p) {
  if constexpr (kWithNccl)
    if (uses_nccl(p)) prepare_for_nccl();  // before the first call of CUDA's, which looks for GPUs
  check_numbers(p);
  check_backend(p, p.ranks());
  check_data(p);
  check_modes(p);
  check_chunks(p);
  make_schedule(p);
  check_place(Job{.plan = p}, false);
  check_nccl(p);
}

void check(const Job& s, bool traced) {
  const Plan& p = s.plan;
  if constexpr (kWithNccl)
    if (uses_nccl(p)) prepare_for_nccl();
  check_numbers(p);  // by which the others divide
  ErrorList found;
  found.check([&] { check_sizes(s); });
  found.check([&] { check_backend(p, p.ranks()); });
  found.check([&] { check_documents(s); });
  found.check([&] { check_float64(s); });
  found.check([&] { check_state_dtype(s); });
  found.check([&] { check_updates(s); });
  found.check([&] { check_data(p); });
  found.check([&] { check_modes(p); });
  if (s.optim.batch % p.microbatches == 0) found.check([&] { check_batch(p, s.optim.batch); });
  found.check([&] { check_tensor(p, s.model); });
  found.check([&] { check_context(p, s.model); });
  found.check([&] { check_experts(p, s.model); });
  found.check([&] { check_pipeline(p, s.model); });
  found.check([&] { check_quantized(s); });
  found.check([&] { check_bfloat16(s); });
  found.check([&] { check_attention(s); });
  found.check([&] { check_place(s, traced); });
  found.check([&] { check_nccl(p); });
  found.raise();
}

}  // namespace tessera
