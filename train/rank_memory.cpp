// Closed forms of what stays, and the peaks of passes beside them.
#include "train/rank_memory.h"

#include <algorithm>

#include "optim/muon.h"
#include "tensor/cpu/vectorize.h"
#include "train/plan_sizes.h"
#include "train/stage_memory.h"

namespace tessera {
namespace {

// Elements of a part that server k of the plan has.
int64_t served(const PartSizes& part, int64_t k, int64_t servers) {
  int64_t sum = 0;
  for (const UnitSizes& u : part.units)
    if (u.trainable && k < servers) sum += std::clamp(u.size() - k * u.piece(servers), int64_t{0}, u.piece(servers));
  return sum;
}

HeldBytes held_by(const PlanSizes& s, const PartSizes& part, int64_t data_rank) {
  const Plan& p = s.plan;
  // Of what is trained: all of it, and a rank's share.
  const int64_t whole = p.zero == ZeroStage::none ? part.whole(true) : part.padded(s.cut, true),
                piece = part.pieces(s.cut, true);
  const int64_t values = part.value_bytes(p.zero == ZeroStage::none ? 0 : s.cut);
  HeldBytes held{.parameters = p.zero == ZeroStage::three ? part.piece_bytes(s.cut) : values,
                 .gradients = (p.zero >= ZeroStage::two ? piece : whole) * s.grad,
                 .optimizer = p.zero == ZeroStage::none ? part.state_bytes() : part.state_bytes(s.cut)};
  if (p.dp_mode == DataMode::dataparallel && data_rank > 0) held = {};  // copies are communication
  int64_t state = 0;                                                    // bytes of an element
  for (const UnitSizes& u : part.units) state = std::max(state, u.state);
  const int64_t own = served(part, data_rank, p.servers);
  if (p.dp_mode == DataMode::ps_sync || p.dp_mode == DataMode::ps_async) held.optimizer = own * state;
  if (p.dp_mode == DataMode::ps_async) {  // a server has a shard beside its worker's whole
    held.parameters += own * s.value;
    held.gradients += own * s.grad;
  }
  if (p.offload == Offload::optimizer) held.optimizer = 0;
  if (p.offload == Offload::parameters) held.parameters = 0;
  if (p.dp_mode == DataMode::diloco) held.optimizer += (p.outer_momentum > 0 ? 2 : 1) * whole * s.wide;
  return held;
}

// Values of the largest unit of a pipeline rank: gathered, and a data rank's shard.
struct LargestUnit {
  int64_t whole = 0, piece = 0;
};

LargestUnit largest_unit(const PlanSizes& s, int64_t rank) {
  LargestUnit most;
  for (const PartSizes& part : s.parts[static_cast<size_t>(rank)])
    for (const UnitSizes& u : part.units) {
      most.whole = std::max(most.whole, u.padded(s.cut) * u.value);
      most.piece = std::max(most.piece, u.piece(s.cut) * u.value);
    }
  return most;
}

// What an update that needs whole matrices takes: what is here of all of them, and the largest on its way. A message of
// a GPU lies there until it is received: what owners get from here, and what is sent back of those that are owned here,
// which are at most their share and one matrix more.
int64_t update_bytes(const PlanSizes& s, const PartSizes& part) {
  int64_t here = 0, most = 0, largest = 0;
  for (const UnitSizes& u : part.units) {
    if (!u.matrices.empty()) here += (s.plan.zero == ZeroStage::none ? u.size() : u.piece(s.cut)) * s.wide;
    for (const Shape& m : u.matrices) {
      const int64_t whole = m.numel() * s.wide;
      most = std::max(most, orthogonalise_bytes(m[0], m[1], s.wide, s.plan.device) + (s.cut > 1 ? whole : 0) +
                                (s.plan.tp > 1 ? 3 * whole : 0));
      largest = std::max(largest, whole);
    }
  }
  return here + most + (s.cut > 1 && s.plan.device == Device::cuda ? 2 * here + largest : 0);
}

std::vector<HeldBytes> held_by_ranks(const PlanSizes& s) {
  std::vector<HeldBytes> out;
  for (const std::vector<PartSizes>& stage : s.parts)
    for (int64_t d = 0; d < s.data; ++d)
      for (const PartSizes& part : stage) out.push_back(held_by(s, part, d));  // in the order of ranks
  return out;
}

// Without a pipeline one is in flight at a time, and those after the second are like the second.
Job with_few_microbatches(Job job) {
  const int64_t few = std::min<int64_t>(2, job.plan.microbatches);
  const ScheduleKind kind = job.plan.schedule;
  const bool one_by_one = kind == ScheduleKind::one_f_one_b || kind == ScheduleKind::naive;
  if (job.plan.pp > 1 || !job.plan.schedule_file.empty() || !one_by_one) return job;
  job.optim.batch = job.optim.batch / job.plan.microbatches * few;
  job.plan.microbatches = few;
  return job;
}

// The threads of a rank, on which the workspace of kernels depends, while one lives.
class Team {
 public:
  explicit Team(const Plan& p) : before_(cpu::threads()) {
    if (!has_processes(p)) cpu::set_threads(static_cast<int>(std::max<int64_t>(1, before_ / p.ranks())));
    if (p.threads_per_rank > 0) cpu::set_threads(static_cast<int>(p.threads_per_rank));
  }
  ~Team() { cpu::set_threads(before_); }
  Team(const Team&) = delete;
  Team& operator=(const Team&) = delete;

 private:
  int before_;
};

}  // namespace

std::vector<HeldBytes> expected_memory(const Job& job) { return held_by_ranks(PlanSizes(job)); }

std::vector<RankMemory> memory_of_ranks(const Job& given, bool alike) {
  const Job job = with_few_microbatches(given);
  const Team team(job.plan);
  const bool rooted = job.plan.dp_mode == DataMode::dataparallel, apart = job.plan.dp_mode == DataMode::ps_async;
  const PlanSizes s(job);
  const int64_t handed = handed_bytes(job), copies = s.parts[0][0].value_bytes() + s.parts[0][0].whole(true) * s.grad;
  // In a pipeline stage 3 of ZeRO fetches for another micro-batch than the one that single ones show: what it holds for
  // that comes on top of passes without it, and another unit is there where the next pass begins with one.
  const bool on_top = job.plan.zero == ZeroStage::three && job.plan.pp > 1;
  std::vector<std::vector<int64_t>> peaks;  // of the first data rank and of another one, by pipeline rank
  std::vector<int64_t> moved;
  for (int d = 0; d < (rooted && s.data > 1 ? 2 : 1); ++d) {
    const std::vector<StageMemory> stages = measure_stages(job, apart ? std::optional<int>() : d, alike);
    peaks.push_back(peaks_of_ranks(s.schedule, on_top ? measure_stages(job, {}, alike) : stages, handed));
    moved.push_back(stages[0].communication - (d > 0 ? copies : 0));
  }
  std::vector<RankMemory> out;
  for (const HeldBytes& held : held_by_ranks(s)) {
    const auto rank = std::ssize(out), together = s.plan.ranks() / s.plan.pp;
    const size_t kind = peaks.size() > 1 && rank > 0 ? 1 : 0;
    const PartSizes& part = s.parts[static_cast<size_t>(rank / together)][static_cast<size_t>(rank % s.plan.tp)];
    const int64_t peak = std::max(peaks[kind][static_cast<size_t>(rank / together)], update_bytes(s, part)),
                  sent = on_top ? 0 : std::min(moved[kind], peak);
    const LargestUnit largest = largest_unit(s, rank / together);
    // copies from the host's memory: of the unit that is gathered, and of the next one
    const int64_t copied = job.plan.offload == Offload::parameters ? 2 * largest.piece : 0;
    out.push_back({held, peak - sent, copied + (on_top ? moved[kind] + largest.whole : sent)});
    if (kind > 0) out.back().communication += copies;
  }
  return out;
}

}  // namespace tessera
