// Modes of the data axis, groups of shards, ranks that train alone, and optimizers that need whole matrices.
#include "train/check_data.h"

#include <fmt/format.h>

#include <cmath>

#include "tensor/field_error.h"
#include "train/names.h"

namespace tessera {
namespace {

// What only one mode reads must have its default in the others.
void check_owners(const Plan& p) {
  const auto owned = [&](const char* field, auto found, auto usual, bool read, const char* owners) {
    if (found != usual && !read)
      throw FieldError(field, fmt::format("goes with `dp_mode` {}, found {}; expected {} beside it, its default",
                                          owners, text_of(p.dp_mode), usual));
  };
  const Plan usual;
  const bool async = p.dp_mode == DataMode::ps_async, diloco = p.dp_mode == DataMode::diloco;
  owned("sync_every", p.sync_every, usual.sync_every, diloco, "diloco");
  owned("sync_fragments", p.sync_fragments, usual.sync_fragments, diloco, "diloco");
  owned("outer_lr", p.outer_lr, usual.outer_lr, diloco, "diloco");
  owned("outer_momentum", p.outer_momentum, usual.outer_momentum, diloco, "diloco");
  owned("servers", p.servers, usual.servers, async || p.dp_mode == DataMode::ps_sync, "ps-sync or ps-async");
  owned("staleness", p.staleness, usual.staleness, async, "ps-async");
  if (!async && !(p.record.empty() && p.replay.empty()))
    throw FieldError(p.record.empty() ? "replay" : "record",
                     fmt::format("goes with `dp_mode` ps-async, found {}", text_of(p.dp_mode)));
}

void check_diloco(const Plan& p) {
  if (p.dp_mode != DataMode::diloco) return;
  if (p.sync_fragments > p.sync_every)
    throw FieldError("sync_fragments",
                     fmt::format("each fragment makes its outer steps in other steps, of which there are {} "
                                 "(`sync_every`); expected at most {}, found {}",
                                 p.sync_every, p.sync_every, p.sync_fragments));
  if (p.zero != ZeroStage::none)
    throw FieldError(
        "zero",
        fmt::format("ranks of `dp_mode` diloco have nothing to share out between two sums; expected 0, found {}",
                    static_cast<int>(p.zero)));
  const bool in_any_order = p.all_reduce == Algorithm::ring || p.all_reduce == Algorithm::native;
  if (in_any_order && (p.pp > 1 || p.tie_copies || p.tp > 1))
    throw FieldError("all_reduce",
                     fmt::format("{} may add what pipeline ranks or tensor ranks have copies of in several orders, and "
                                 "in `dp_mode` diloco nothing makes them equal again; expected direct, tree or root{}",
                                 p.all_reduce == Algorithm::ring ? "a ring" : "a library",
                                 uses_nccl(p) ? ", and `backend` threads or mpi" : ""));
  if (!(p.outer_lr > 0) || !std::isfinite(p.outer_lr))
    throw FieldError("outer_lr", fmt::format("expected a number above 0, found {}", p.outer_lr));
  if (!(p.outer_momentum >= 0 && p.outer_momentum < 1))
    throw FieldError("outer_momentum", fmt::format("expected a number in [0, 1), found {}", p.outer_momentum));
}

void check_offload(const Plan& p) {
  if (p.offload != Offload::parameters) return;
  if (p.zero != ZeroStage::three)
    throw FieldError("offload",
                     fmt::format("parameters moves the shards of `zero` 3; expected `zero` 3 beside it, found {}",
                                 static_cast<int>(p.zero)));
  if (p.device == Device::cpu)
    throw FieldError(
        "offload",
        "parameters moves them to the host's memory. With `device` cpu they lie there already, and a mapped "
        "file would save nothing, since every pass reads them; expected `device` cuda beside it, found cpu");
}

void check_muon(const Job& s) {
  if (s.optim.optimizer != OptimizerKind::muon) return;
  const DataMode mode = s.plan.dp_mode;
  if (mode == DataMode::ps_sync || mode == DataMode::ps_async)
    throw FieldError(
        "optimizer",
        fmt::format("muon needs whole matrices, which the servers of {} have not; expected another, or `dp_mode` ddp",
                    text_of(mode)));
  if (s.model.lora.rank > 0)
    throw FieldError("optimizer", "muon is for matrices of layers, which are frozen beside adapters; expected adamw");
  if (s.optim.state_dtype == DType::bfloat16)
    throw FieldError("state_dtype", "muon keeps its momentum in fp32; expected fp32, found bf16");
}

void check_fragments(const Job& s) {
  if (s.plan.sync_fragments > s.model.layers)
    throw FieldError("sync_fragments",
                     fmt::format("a fragment has at least one of the {} layers; expected at most {}, found {}",
                                 s.model.layers, s.model.layers, s.plan.sync_fragments));
}

}  // namespace

void check_data(const Plan& p) {
  if (p.all_reduce == Algorithm::native && !uses_nccl(p) && p.backend != Backend::mpi)
    throw FieldError("all_reduce",
                     fmt::format("{} ranks have no library of their own; expected direct, ring, tree or root",
                                 p.backend == Backend::tcp ? "TCP" : "thread"));
  if (p.shard_ranks > 0 && p.zero == ZeroStage::none)
    throw FieldError("shard_ranks", "goes with `zero` 1, 2 or 3, found 0");
  if (p.shard_ranks > 0 && (p.dp * p.cp) % p.shard_ranks != 0)
    throw FieldError(
        "shard_ranks",
        fmt::format("groups of {} ranks do not divide the {} that share the batch; the nearest that do: {}",
                    p.shard_ranks, p.dp * p.cp, divisors_near(p.dp * p.cp, p.shard_ranks)));
  if (p.dp_mode == DataMode::ddp || p.dp_mode == DataMode::diloco) return;
  if (p.servers > p.dp)
    throw FieldError("servers", fmt::format("expected at most the {} ranks, found {}", p.dp, p.servers));
  const std::string_view mode = text_of(p.dp_mode);
  if (uses_nccl(p))
    throw FieldError("backend",
                     fmt::format("{} adds at one rank, in rank order, and nccl does not; expected threads or mpi "
                                 "beside `dp_mode` {}, found nccl",
                                 mode, mode));
  if (p.all_reduce != Algorithm::direct)
    throw FieldError("all_reduce", fmt::format("{} adds at one rank, in rank order; expected direct, found {}", mode,
                                               text_of(p.all_reduce)));
  if (p.zero != ZeroStage::none)
    throw FieldError("zero", fmt::format("{} goes with `dp_mode` ddp, found {}", static_cast<int>(p.zero), mode));
  if (p.ranks() > p.dp)
    throw FieldError("dp_mode",
                     fmt::format("{} is for data-parallel ranks alone; expected ddp beside `tp`, `pp` and `cp`", mode));
}

void check_modes(const Plan& p) {
  check_owners(p);
  check_diloco(p);
  check_offload(p);
  if (p.dp_mode == DataMode::ps_async && p.tie_copies)
    throw FieldError("tie_copies", "ps-async has no steps in common; expected another `dp_mode`");
  if (p.dp_mode == DataMode::dataparallel && has_processes(p))
    throw FieldError("dp_mode", "dataparallel is one process by definition; expected ddp or ps-sync for several");
}

void check_updates(const Job& s) {
  check_muon(s);
  check_fragments(s);
}

}  // namespace tessera
