// Plans that cannot be are refused before anything starts, with the number at fault and the nearest that can.
#include <fmt/format.h>

#include <algorithm>
#include <optional>

#include "app/attention_choice.h"
#include "app/device.h"
#include "app/plan.h"
#include "app/step_graph.h"
#include "parallel/comm/backends.h"
#include "parallel/comm/nccl_api.h"
#include "parallel/comm/surroundings.h"
#include "tensor/error.h"

namespace tessera {
namespace {

// --backend is a wish; what started this process may not be able to fulfil it.
void check_backend(const TrainOptions& o, const Axes& a) {
  const std::optional<MpiSurroundings> job = mpi_surroundings();
  if (backend_of(o) == Backend::threads && job && job->ranks > 1)
    throw Error(
        fmt::format("--backend: {} has started {} processes, each of which would be a run of its own; expected mpi, or "
                    "one process, found threads",
                    job->launcher, job->ranks));
  const int64_t wanted = std::max(o.ranks.value_or(1), a.ranks());
  if (backend_of(o) == Backend::mpi && !job && wanted > 1)
    throw Error(
        fmt::format("--backend: mpi takes its ranks from mpirun, which did not start this process; expected "
                    "mpirun -n {} in front of tessera, or --backend threads",
                    wanted));
}

void check_ranks(const TrainOptions& o, const Axes& a) {
  const int64_t ranks = given_ranks(o);
  if (backend_of(o) == Backend::mpi && o.ranks && *o.ranks != ranks)
    throw Error(fmt::format("--ranks: the job has {} ranks; expected that or no --ranks, found {}", ranks, *o.ranks));
  if (ranks == 0 || a.ranks() == ranks) return;
  const int64_t rest = a.ranks() / a.dp;
  const std::string nearest = ranks % rest == 0
                                  ? fmt::format("--dp {}", ranks / rest)
                                  : fmt::format("{} ranks", multiples_near(o.dp ? a.ranks() : rest, ranks));
  throw Error(
      fmt::format("--ranks: pp {} x dp {} x cp {} x tp {} makes {} ranks; expected {}; the nearest that can: {}", a.pp,
                  a.dp, a.cp, a.tp, a.ranks(), ranks, nearest));
}

void check_data(const TrainOptions& o, const Axes& a) {
  const int64_t parts = a.dp * o.microbatches;
  if (o.batch % parts != 0)
    throw Error(
        fmt::format("--batch: {} sequences cannot be cut evenly into {} data ranks x {} micro-batches; the nearest "
                    "that can: {}",
                    o.batch, a.dp, o.microbatches, multiples_near(parts, o.batch)));
  if (o.servers > a.dp) throw Error(fmt::format("--servers: expected at most the {} ranks, found {}", a.dp, o.servers));
  if (o.all_reduce == "native" && backend_of(o) != Backend::mpi && !uses_nccl(o))
    throw Error("--all-reduce: thread ranks have no library of their own; expected direct, ring, tree or root");
  if (o.dp_mode == "ddp") return;
  if (uses_nccl(o))
    throw Error(
        fmt::format("--backend: {} adds at one rank, in rank order, and nccl does not; expected threads or mpi "
                    "beside --dp-mode {}, found nccl",
                    o.dp_mode, o.dp_mode));
  if (o.all_reduce != "direct")
    throw Error(fmt::format("--all-reduce: {} adds at one rank, in rank order; expected direct, found {}", o.dp_mode,
                            o.all_reduce));
  if (o.zero > 0) throw Error(fmt::format("--zero: {} goes with --dp-mode ddp, found {}", o.zero, o.dp_mode));
  if (a.ranks() > a.dp)
    throw Error(fmt::format("--dp-mode: {} is for data-parallel ranks alone; expected ddp beside --tp, --pp and --cp",
                            o.dp_mode));
}

void check_modes(const TrainOptions& o) {
  if (o.dp_mode != "ps-async" && (o.record || o.replay))
    throw Error(fmt::format("--{}: goes with --dp-mode ps-async, found {}", o.record ? "record" : "replay", o.dp_mode));
  if (o.dp_mode == "dataparallel" && backend_of(o) == Backend::mpi)
    throw Error("--dp-mode: dataparallel is one process by definition; expected ddp or ps-sync under MPI");
}

void check_tensor(const TrainOptions& o, const Axes& a, const ModelSizes& s) {
  if (s.heads % a.tp != 0)
    throw Error(fmt::format("--tp: {} does not divide the {} heads; the nearest that does: {}", a.tp, s.heads,
                            divisors_near(s.heads, a.tp)));
  if (o.vocab && *o.vocab < a.tp)
    throw Error(fmt::format("--tp: a vocabulary of {} has no row for each of {} ranks", *o.vocab, a.tp));
  const int64_t tokens = s.context / a.cp;
  if (o.sp && tokens % a.tp != 0)
    throw Error(
        fmt::format("--sp: {} ranks of --tp do not divide the {} tokens that each has; the nearest that does: "
                    "--tp {}",
                    a.tp, tokens, divisors_near(tokens, a.tp)));
}

void check_context(const TrainOptions& o, const Axes& a, const ModelSizes& s) {
  if (a.cp == 1) return;
  const bool ring = o.cp_mode == "ring";
  const int64_t parts = ring ? 2 * a.cp : a.cp;  // the ring deals out two chunks to each
  if (s.context % parts != 0)
    throw Error(
        fmt::format("--cp: {} ranks cut a context of {} into {} parts; the nearest --context that can be cut: {}", a.cp,
                    s.context, parts, multiples_near(parts, s.context)));
  const int64_t heads = s.heads / a.tp;
  if (!ring && heads % a.cp != 0)
    throw Error(
        fmt::format("--cp: {} ranks of --cp-mode ulysses do not divide the {} heads that each has; the nearest "
                    "that does: {}",
                    a.cp, heads, divisors_near(heads, a.cp)));
}

// NCCL has one order of sums, its own, and no GPU for a second rank.
void check_nccl(const TrainOptions& o, const Axes& a) {
  if (!uses_nccl(o)) return;
  if (o.device != "cuda")
    throw Error(
        fmt::format("--backend: nccl is for ranks on GPUs; expected --device cuda beside it, found {}", o.device));
  if (o.all_reduce != "native")
    throw Error(fmt::format(
        "--backend: nccl adds in an order of its own; expected --all-reduce native beside it, found {}", o.all_reduce));
  if (backend_of(o) == Backend::threads && a.ranks() > gpu_count())
    throw Error(
        fmt::format("--backend: nccl wants a GPU for each of {} ranks, and this machine has {}; without it ranks "
                    "share one",
                    a.ranks(), gpu_count()));
}

void check_place(const TrainOptions& o, const Axes& a) {
  check_attention(o);
  check_device(o.device);
  no_graph_because(o, static_cast<int>(a.ranks()));
  if (o.device == "cpu") return;
  if (o.all_reduce == "native" && !uses_nccl(o))
    throw Error("--all-reduce: MPI's own sums are of arrays in the host's memory; expected direct, ring, tree or root");
}

void check_pipeline(const TrainOptions& o, const Axes& a, const ModelSizes& s) {
  if (o.chunks && o.schedule != "interleaved")
    throw Error(fmt::format("--chunks: goes with --schedule interleaved, found {}", o.schedule));
  const Schedule schedule = schedule_of(o);
  if (schedule.stages > s.layers)
    throw Error(fmt::format("--pp: {} ranks make {} stages, more than the {} layers; expected at most {} stages", a.pp,
                            schedule.stages, s.layers, s.layers));
}

}  // namespace

void check_plan(const TrainOptions& o) {
  if constexpr (kWithNccl)
    if (uses_nccl(o)) load_kernels_early();  // before the first call of CUDA's, which looks for GPUs
  const Axes axes = axes_of(o);
  const ModelSizes sizes = sizes_of(o);
  check_backend(o, axes);
  check_ranks(o, axes);
  check_data(o, axes);
  check_modes(o);
  check_tensor(o, axes, sizes);
  check_context(o, axes, sizes);
  check_pipeline(o, axes, sizes);
  check_place(o, axes);
  check_nccl(o, axes);
}

}  // namespace tessera
