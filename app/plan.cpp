// From options to a plan.
#include "app/plan.h"

#include <fmt/format.h>

#include <algorithm>
#include <filesystem>
#include <optional>

#include "parallel/comm/surroundings.h"
#include "tensor/cpu/vectorize.h"
#include "tensor/error.h"

namespace tessera {
namespace {

constexpr int64_t kDefaultRanks = 2;
constexpr double kMegabyte = 1 << 20;

bool divides(int64_t ranks, const TrainOptions& o) { return o.batch % (ranks * o.microbatches) == 0; }

}  // namespace

DType dtype_named(const std::string& name) {
  if (name == "fp64") return DType::float64;
  return name == "bf16" ? DType::bfloat16 : DType::float32;
}

Backend backend_of(const TrainOptions& o) {
  if (o.backend) return *o.backend == "mpi" ? Backend::mpi : Backend::threads;
  return mpi_surroundings() ? Backend::mpi : Backend::threads;
}

int64_t ranks_of(const TrainOptions& o) {
  if (backend_of(o) == Backend::mpi) {
    const std::optional<MpiSurroundings> job = mpi_surroundings();
    return job ? job->ranks : 1;
  }
  if (o.ranks) return *o.ranks;
  if (o.dp) return *o.dp;
  return cpu::threads() >= kDefaultRanks && divides(kDefaultRanks, o) ? kDefaultRanks : 1;
}

void check_plan(const TrainOptions& o) {
  const int64_t ranks = ranks_of(o);
  if (o.ranks && *o.ranks != ranks)
    throw Error(fmt::format("--ranks: the job has {} ranks; expected that or no --ranks, found {}", ranks, *o.ranks));
  if (o.dp && !o.ranks && *o.dp != ranks)
    throw Error(fmt::format("--dp: expected the {} ranks of the job, found {}", ranks, *o.dp));
  if (o.ranks && o.dp && *o.ranks != *o.dp)
    throw Error(fmt::format("--dp: expected the {} of --ranks, since it is the only axis; found {}", *o.ranks, *o.dp));
  const int64_t parts = ranks * o.microbatches;
  if (!divides(ranks, o)) {
    const int64_t below = o.batch / parts * parts, above = below + parts;
    throw Error(fmt::format(
        "--batch: {} sequences cannot be cut evenly into {} data ranks x {} micro-batches; the "
        "nearest that can: {}",
        o.batch, ranks, o.microbatches, below > 0 ? fmt::format("{} or {}", below, above) : std::to_string(above)));
  }
  if (o.servers > ranks)
    throw Error(fmt::format("--servers: expected at most the {} ranks, found {}", ranks, o.servers));
  if (o.all_reduce == "native" && backend_of(o) != Backend::mpi)
    throw Error("--all-reduce: thread ranks have no library of their own; expected direct, ring, tree or root");
  if (o.dp_mode != "ddp" && o.all_reduce != "direct")
    throw Error(fmt::format("--all-reduce: {} adds at one rank, in rank order; expected direct, found {}", o.dp_mode,
                            o.all_reduce));
  if (o.dp_mode != "ps-async" && (o.record || o.replay))
    throw Error(fmt::format("--{}: goes with --dp-mode ps-async, found {}", o.record ? "record" : "replay", o.dp_mode));
  if (o.dp_mode == "ps-async" && o.resume)
    throw Error(
        "--resume: an asynchronous run cannot be continued, since its servers and workers were not at one step");
  if (o.dp_mode == "dataparallel" && backend_of(o) == Backend::mpi)
    throw Error("--dp-mode: dataparallel is one process by definition; expected ddp or ps-sync under MPI");
  if (o.zero > 0 && o.dp_mode != "ddp")
    throw Error(fmt::format("--zero: {} goes with --dp-mode ddp, found {}", o.zero, o.dp_mode));
}

LaunchOptions launch_options(const TrainOptions& o) {
  LaunchOptions l;
  l.backend = backend_of(o);
  l.ranks = static_cast<int>(ranks_of(o));
  l.threads_per_rank = static_cast<int>(o.threads_per_rank.value_or(0));
  l.timeout_s = o.timeout;
  l.algorithm = algorithm_named(o.all_reduce);
  return l;
}

DataOptions data_options(const TrainOptions& o) {
  DataOptions d;
  d.mode = o.dp_mode;
  d.servers = static_cast<int>(o.servers);
  d.zero = static_cast<int>(o.zero);
  d.microbatches = o.microbatches;
  d.bucket_bytes = static_cast<int64_t>(o.bucket_mb * kMegabyte);
  d.dtype = dtype_named(o.dtype);
  d.grad_dtype = o.dtype == "fp64" ? DType::float64 : dtype_named(o.grad_dtype);
  d.seed = static_cast<uint64_t>(o.seed);
  return d;
}

OptimizerOptions optimizer_options(const TrainOptions& o) {
  return {.momentum = o.momentum,
          .beta1 = o.beta1,
          .beta2 = o.beta2,
          .weight_decay = o.weight_decay,
          .state_arena = o.offload == "optimizer" ? make_file_arena(std::filesystem::temp_directory_path()) : nullptr};
}

std::string describe_plan(const TrainOptions& o) {
  const int64_t ranks = ranks_of(o);
  if (ranks == 1) return "one rank";
  return fmt::format("{} {} ranks, {}", ranks, backend_of(o) == Backend::mpi ? "MPI" : "thread",
                     o.zero > 0 ? fmt::format("ZeRO-{}", o.zero) : o.dp_mode);
}

}  // namespace tessera
