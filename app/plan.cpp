// From options to a plan.
#include "app/plan.h"

#include <fmt/format.h>

#include <string_view>

#include "app/attention_choice.h"
#include "app/device.h"
#include "parallel/comm/surroundings.h"
#include "parallel/pipeline/schedules.h"
#include "tensor/error.h"

namespace tessera {
namespace {

constexpr double kMegabyte = 1 << 20;

}  // namespace

DType dtype_named(const std::string& name) {
  if (name == "fp64") return DType::float64;
  return name == "bf16" ? DType::bfloat16 : DType::float32;
}

Backend backend_of(const TrainOptions& o) {
  if (o.backend && !uses_nccl(o)) return *o.backend == "mpi" ? Backend::mpi : Backend::threads;
  return mpi_surroundings() ? Backend::mpi : Backend::threads;
}

bool uses_nccl(const TrainOptions& o) { return o.backend == "nccl"; }

int64_t ranks_of(const TrainOptions& o) { return axes_of(o).ranks(); }

bool splits_sums(const TrainOptions& o) {
  const Axes axes = axes_of(o);
  return axes.tp > 1 || axes.cp > 1 || asks_cudnn(o);
}

Schedule schedule_of(const TrainOptions& o) {
  try {
    return make_schedule(o.schedule, static_cast<int>(axes_of(o).pp), static_cast<int>(o.microbatches),
                         static_cast<int>(o.chunks.value_or(0)));
  } catch (const InputError&) {
    throw;  // names the file
  } catch (const Error& e) {
    const std::string_view text = e.what();
    throw Error(fmt::format("--schedule: {}", text.substr(text.find(']') == text.npos ? 0 : text.find(']') + 2)));
  }
}

LaunchOptions launch_options(const TrainOptions& o) {
  LaunchOptions l;
  l.backend = uses_nccl(o) ? Backend::nccl : backend_of(o);
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
  d.copies = static_cast<int>(axes_of(o).cp);
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
          .state_arena = o.offload == "optimizer" ? offload_arena(o.device) : nullptr};
}

std::string describe_plan(const TrainOptions& o) {
  const Axes axes = axes_of(o);
  const bool scheduled = axes.pp > 1 || schedule_of(o).stages > 1 || schedule_of(o).has(Do::I);
  if (axes.ranks() == 1) return scheduled ? "one rank, " + o.schedule : "one rank";
  std::string parts;
  const auto part = [&](int64_t size, const std::string& name) {
    if (size > 1) parts += fmt::format("{}{} {}", parts.empty() ? "" : " x ", name, size);
  };
  part(axes.pp, "pp");
  part(axes.dp, "dp");
  part(axes.cp, "cp");
  part(axes.tp, o.sp ? "tp+sp" : "tp");
  std::string text = fmt::format("{} {} ranks", axes.ranks(), backend_of(o) == Backend::mpi ? "MPI" : "thread");
  if (uses_nccl(o)) text += " with NCCL";
  if (axes.ranks() > axes.dp) text += fmt::format(" ({})", parts);
  if (scheduled) text += ", " + o.schedule;
  if (axes.cp > 1) text += ", " + o.cp_mode;
  if (axes.dp * axes.cp > 1 || o.zero > 0) text += ", " + (o.zero > 0 ? fmt::format("ZeRO-{}", o.zero) : o.dp_mode);
  return text;
}

}  // namespace tessera
