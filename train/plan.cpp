// What follows from a plan alone.
#include "train/plan.h"

#include <fmt/format.h>

#include <algorithm>

#include "parallel/comm/surroundings.h"
#include "tensor/error.h"
#include "train/device.h"
#include "train/names.h"

namespace tessera {
namespace {

std::string one_or_two(int64_t below, int64_t above) {
  return below == above || below < 1 ? std::to_string(above) : fmt::format("{} or {}", below, above);
}

}  // namespace

std::string schedule_name(const Plan& p) {
  return p.schedule_file.empty() ? std::string(text_of(p.schedule)) : p.schedule_file;
}

bool has_processes(const Plan& p) {
  return p.backend == Backend::mpi || p.backend == Backend::tcp ||
         (uses_nccl(p) && (!p.rendezvous.empty() || mpi_surroundings()));
}

bool uses_nccl(const Plan& p) { return p.backend == Backend::nccl; }

bool splits_sums(const Plan& p) { return p.tp > 1 || p.cp > 1 || asks_cudnn(p); }

int64_t shared_over(const Plan& p) {
  if (p.zero == ZeroStage::none) return 1;
  return p.shard_ranks > 0 ? p.shard_ranks : p.dp * p.cp;
}

Schedule schedule_of(const Plan& p) {
  const auto ranks = static_cast<int>(p.pp), microbatches = static_cast<int>(p.microbatches),
             chunks = static_cast<int>(p.chunks);
  try {
    return p.schedule_file.empty() ? make_schedule(p.schedule, ranks, microbatches, chunks)
                                   : schedule_from_file(p.schedule_file, ranks, microbatches, chunks);
  } catch (const InputError&) {
    throw;  // names the file
  } catch (const Error& e) {
    const std::string text = e.what();
    throw FieldError("schedule", text.substr(text.find(']') == text.npos ? 0 : text.find(']') + 2));
  }
}

LaunchOptions launch_options(const Plan& p) {
  return {.backend = p.backend,
          .ranks = static_cast<int>(p.ranks()),
          .threads_per_rank = static_cast<int>(p.threads_per_rank),
          .timeout_s = p.timeout,
          .rendezvous = p.rendezvous,
          .algorithm = p.all_reduce};
}

std::string describe(const Plan& p) {
  const Schedule schedule = schedule_of(p);
  const bool scheduled = schedule.ranks > 1 || schedule.stages > 1 || schedule.has(Do::I);
  if (p.ranks() == 1) return scheduled ? "one rank, " + schedule_name(p) : "one rank";
  std::string parts;
  const auto part = [&](int64_t size, const std::string& name) {
    if (size > 1) parts += fmt::format("{}{} {}", parts.empty() ? "" : " x ", name, size);
  };
  part(p.pp, "pp");
  part(p.dp, "dp");
  part(p.cp, "cp");
  part(p.tp, p.sp ? "tp+sp" : "tp");
  const char* const kind = !p.rendezvous.empty() ? "TCP" : has_processes(p) ? "MPI" : "thread";
  std::string text = fmt::format("{} {} ranks", p.ranks(), kind);
  if (uses_nccl(p)) text += " with NCCL";
  if (p.ranks() > p.dp) text += fmt::format(" ({})", parts);
  if (scheduled) text += ", " + schedule_name(p);
  if (p.cp > 1) text += fmt::format(", {}", text_of(p.cp_mode));
  const bool zero = p.zero != ZeroStage::none;
  if (p.ep > 1) text += fmt::format(", ep {}", p.ep);
  if (zero && p.shard_ranks > 0)
    return text + fmt::format(", ZeRO-{} in groups of {}", static_cast<int>(p.zero), p.shard_ranks);
  if (zero) return text + fmt::format(", ZeRO-{}", static_cast<int>(p.zero));
  if (p.dp * p.cp == 1) return text;
  text += fmt::format(", {}", text_of(p.dp_mode));
  if (p.dp_mode == DataMode::diloco) text += fmt::format(" every {} steps", p.sync_every);
  return p.sync_fragments > 1 ? text + fmt::format(" in {} fragments", p.sync_fragments) : text;
}

std::string divisors_near(int64_t n, int64_t wanted) {
  int64_t below = std::min(wanted, n), above = wanted;
  while (below > 1 && n % below != 0) --below;
  while (above < n && n % above != 0) ++above;
  return one_or_two(below, above > n ? below : above);
}

std::string multiples_near(int64_t n, int64_t wanted) {
  const int64_t below = wanted / n * n;
  return one_or_two(below, below == wanted ? wanted : below + n);
}

}  // namespace tessera
