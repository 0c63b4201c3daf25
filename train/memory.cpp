// Closed forms of persistent memory, and peaks of the passes.
#include "train/memory.h"

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "autograd/ops.h"
#include "optim/muon.h"
#include "parallel/comm/fake_transport.h"
#include "parallel/pipeline/validate.h"
#include "tensor/cpu/loops.h"
#include "train/expected_bytes.h"
#include "train/model_part.h"

namespace tessera {

namespace {

int64_t served(const ShardSizes& sizes, int64_t k, int64_t servers) {
  int64_t sum = 0;
  for (const UnitSizes& u : sizes.units)
    if (u.trainable && k < servers) sum += std::clamp(u.size() - k * u.shard(servers), int64_t{0}, u.shard(servers));
  return sum;
}

MemoryByCategory held_by(const PlanSizes& s, const ShardSizes& sizes, int64_t data_rank) {
  const Plan& p = s.plan;
  // Trainable elements: unsharded, and one rank's shard.
  const int64_t full = p.zero == ZeroStage::none ? sizes.full(true) : sizes.padded(s.cut, true),
                shard = sizes.shard(s.cut, true);
  MemoryByCategory held = state_with_zero<int64_t>(
      p.zero, {sizes.value_bytes(p.zero == ZeroStage::none ? 0 : s.cut), full * s.grad, sizes.state_bytes()},
      {sizes.shard_bytes(s.cut), shard * s.grad, sizes.state_bytes(s.cut)});
  if (p.dp_mode == DataMode::dataparallel && data_rank > 0) held = {};  // replicas count as communication
  int64_t state = 0;                                                    // bytes per element
  for (const UnitSizes& u : sizes.units) state = std::max(state, u.state);
  const int64_t own = served(sizes, data_rank, p.servers);
  if (p.dp_mode == DataMode::ps_sync || p.dp_mode == DataMode::ps_async) held.optimizer = own * state;
  if (p.dp_mode == DataMode::ps_async) {  // a server shard in addition to the worker's full copy
    held.parameters += own * s.value;
    held.gradients += own * s.grad;
  }
  if (p.offload == Offload::optimizer) held.optimizer = 0;
  if (p.offload == Offload::parameters) held.parameters = 0;
  if (p.dp_mode == DataMode::diloco) held.optimizer += (p.outer_momentum > 0 ? 2 : 1) * full * s.wide;
  return held;
}

// Bytes of the largest unit of a pipeline rank: unsharded, and one data rank's shard.
struct LargestUnit {
  int64_t full = 0, shard = 0;
};

LargestUnit largest_unit(const PlanSizes& s, int64_t rank) {
  LargestUnit largest;
  for (const ShardSizes& sizes : s.shards[static_cast<size_t>(rank)])
    for (const UnitSizes& u : sizes.units) {
      largest.full = std::max(largest.full, u.padded(s.cut) * u.value);
      largest.shard = std::max(largest.shard, u.shard(s.cut) * u.value);
    }
  return largest;
}

// Memory of updates with full matrices: the local shards of all matrices, and the largest matrix in transit. A GPU's
// messages stay allocated until received: shards sent to owners, and results returned for matrices owned here, which
// are at most 1 / n of all plus one matrix.
int64_t update_bytes(const PlanSizes& s, const ShardSizes& sizes) {
  int64_t here = 0, max_bytes = 0, largest = 0;
  for (const UnitSizes& u : sizes.units) {
    if (!u.matrices.empty()) here += (s.plan.zero == ZeroStage::none ? u.size() : u.shard(s.cut)) * s.wide;
    for (const Shape& m : u.matrices) {
      const int64_t full = m.numel() * s.wide;
      max_bytes = std::max(max_bytes, orthogonalise_bytes(m[0], m[1], s.wide, s.plan.device) + (s.cut > 1 ? full : 0) +
                                          (s.plan.tp > 1 ? 3 * full : 0));
      largest = std::max(largest, full);
    }
  }
  return here + max_bytes + (s.cut > 1 && s.plan.device == Device::cuda ? 2 * here + largest : 0);
}

std::vector<MemoryByCategory> held_by_ranks(const PlanSizes& s) {
  std::vector<MemoryByCategory> out;
  for (const std::vector<ShardSizes>& stage : s.shards)
    for (int64_t d = 0; d < s.data; ++d)
      for (const ShardSizes& sizes : stage) out.push_back(held_by(s, sizes, d));
  return out;
}

// Without a pipeline, one micro-batch is in flight at a time, and all but the first need equal memory.
TrainConfig with_few_microbatches(TrainConfig job) {
  const int64_t few = std::min<int64_t>(2, job.plan.microbatches);
  const ScheduleKind kind = job.plan.schedule;
  const bool one_by_one = kind == ScheduleKind::one_f_one_b || kind == ScheduleKind::naive;
  if (job.plan.pp > 1 || !job.plan.schedule_file.empty() || !one_by_one) return job;
  job.optim.batch = job.optim.batch / job.plan.microbatches * few;
  job.plan.microbatches = few;
  return job;
}

// Temporarily sets the rank's number of threads, on which kernel workspaces depend.
class Team : NotCopied {
 public:
  explicit Team(const Plan& p) : before_(cpu::threads()) {
    if (!has_processes(p)) cpu::set_threads(static_cast<int>(std::max<int64_t>(1, before_ / p.ranks())));
    if (p.threads_per_rank > 0) cpu::set_threads(static_cast<int>(p.threads_per_rank));
  }
  ~Team() { cpu::set_threads(before_); }

 private:
  int before_;
};

}  // namespace

std::vector<MemoryByCategory> expected_memory(const TrainConfig& job) { return held_by_ranks(PlanSizes(job)); }

std::vector<RankMemory> memory_of_ranks(const TrainConfig& given, bool alike) {
  const TrainConfig job = with_few_microbatches(given);
  const Team team(job.plan);
  const bool rooted = job.plan.dp_mode == DataMode::dataparallel, apart = job.plan.dp_mode == DataMode::ps_async;
  const PlanSizes s(job);
  const Schedule schedule = make_schedule(job.plan);
  const int64_t handed = handed_bytes(job), copies = s.shards[0][0].value_bytes() + s.shards[0][0].full(true) * s.grad;
  // In a pipeline, ZeRO-3 prefetches for a different micro-batch, which a dry run with one micro-batch cannot measure:
  // prefetch buffers add to the passes measured without ZeRO, and a different unit is resident at the start of each
  // pass.
  const bool on_top = job.plan.zero == ZeroStage::three && job.plan.pp > 1;
  std::vector<std::vector<int64_t>> peaks;  // of the first and of another data rank, by pipeline rank
  std::vector<int64_t> moved;
  for (int d = 0; d < (rooted && s.data > 1 ? 2 : 1); ++d) {
    const std::vector<StageMemory> stages = measure_stages(job, apart ? std::optional<int>() : d, alike);
    peaks.push_back(peaks_of_ranks(schedule, on_top ? measure_stages(job, {}, alike) : stages, handed));
    moved.push_back(stages[0].communication - (d > 0 ? copies : 0));
  }
  std::vector<RankMemory> out;
  for (const MemoryByCategory& held : held_by_ranks(s)) {
    const auto rank = std::ssize(out), together = s.plan.ranks() / s.plan.pp;
    const size_t kind = peaks.size() > 1 && rank > 0 ? 1 : 0;
    const ShardSizes& sizes = s.shards[static_cast<size_t>(rank / together)][static_cast<size_t>(rank % s.plan.tp)];
    const int64_t peak = std::max(peaks[kind][static_cast<size_t>(rank / together)], update_bytes(s, sizes)),
                  sent = on_top ? 0 : std::min(moved[kind], peak);
    const LargestUnit largest = largest_unit(s, rank / together);
    // Copies from host memory: the gathered unit and the prefetched one.
    const int64_t copied = job.plan.offload == Offload::parameters ? 2 * largest.shard : 0;
    out.push_back({held, peak - sent, copied + (on_top ? moved[kind] + largest.full : sent)});
    if (kind > 0) out.back().communication += copies;
  }
  return out;
}

namespace {

std::unique_ptr<Communicator> alone_on(const std::string& axis, int64_t ranks, int rank = 0,
                                       bool supports_row_slices = false) {
  return std::make_unique<Communicator>(
      std::make_unique<FakeTransport>(rank, static_cast<int>(ranks), "threads", supports_row_slices), axis);
}

// Whether ranks read each other's arrays directly, exchanging row slices without copies.
bool supports_row_slices(const Plan& plan) {
  return plan.backend == Backend::threads && plan.all_reduce == Algorithm::direct;
}

std::unique_ptr<Communicator> tensor_axis(const Plan& plan, int rank) {
  std::unique_ptr<Communicator> axis = alone_on("tp", plan.tp, rank, supports_row_slices(plan));
  if (plan.layout_invariant) axis->add_in_pairs();
  return axis;
}

// One micro-batch at a time through all stages and back.
Schedule one_after_another(int stages, int microbatches, bool split) {
  Schedule s = empty_schedule("one after another", 1, stages, microbatches);
  for (int i = 0; i < microbatches; ++i) {
    for (int stage = 0; stage < stages; ++stage) s.actions[0].push_back({PassKind::F, stage, i});
    for (int stage = stages; stage-- > 0;) s.actions[0].push_back({PassKind::B, stage, i});
  }
  return split ? split_backward(s) : s;
}

// Arena usage at the beginning of a pass: live bytes, and the peak since the previous pass began.
struct Sample {
  int64_t live = 0, peak = 0, communication = 0;
};

// A host arena whose ops allocate as in the plan.
ArenaPtr host_arena_for(const Plan& plan) {
  ArenaPtr arena = make_arena();
  arena->local<DryRunDevice>().device = plan.device;
  arena->local<KernelChoice>().layout_invariant = plan.layout_invariant;
  return arena;
}

TrainConfig without_strategy(TrainConfig job) {
  job.plan.dp_mode = DataMode::ddp;
  job.plan.zero = ZeroStage::none;
  return job;
}

// Fake peers send nothing: values are uninitialized, sizes are correct.
class DryRunRank final : public BatchSource {
 public:
  DryRunRank(const TrainConfig& job, const PlanSizes& sizes, bool split, std::optional<int> data_rank, int cp_rank,
             std::vector<Range> layers)
      : sizes_(sizes),
        through_root_(data_rank && job.plan.dp_mode == DataMode::dataparallel),
        tp_(tensor_axis(job.plan, sizes_.largest_tp_rank())),
        cp_(alone_on("cp", sizes_.plan.cp, cp_rank, supports_row_slices(job.plan))),
        pp_(alone_on("pp", 1)),
        data_(alone_on("dp", data_rank ? shared(job) : 1, data_rank.value_or(0))),
        ep_(alone_on("ep", sizes_.plan.ep)),
        edp_(alone_on("edp", data_rank ? shared(job) / sizes_.plan.ep : 1)),
        full_model_(build_model(job.make, sizes_.config)),
        part_(*full_model_, job.make, {*pp_, *data_, *cp_, *tp_, ep_.get()},
              options(data_rank ? job : without_strategy(job), split, std::move(layers))) {
    if (!data_rank && job.plan.zero == ZeroStage::three) drop_packs_after_use();
  }

  const Schedule& list() const { return part_.schedule(); }
  std::vector<Sample> step() {
    samples_.clear();
    part_.step(*this);
    sample();
    part_.data_step().reduce();
    return samples_;
  }

 private:
  // ZeRO-3 frees a unit's packed weights when it releases the unit after each pass.
  void drop_packs_after_use() {
    for (const Module::Unit& unit : part_.model().layout())
      unit.module->wrap([module = unit.module](const Module::Inner& inner, const Var& x) {
        const auto drop = [module] { module->drop_packs(); };
        Var y = inner(grad_enabled() && x.defined() ? on_backward(x.tracked(), drop) : x);
        drop();
        return y;
      });
  }
  int64_t shared(const TrainConfig& job) const { return job.plan.shard_ranks > 0 ? sizes_.cut : sizes_.data; }
  ModelPart::Options options(const TrainConfig& job, bool split, std::vector<Range> layers) {
    TrainConfig lone = job;
    if (data_->size() < sizes_.data) lone.plan.cp = 1;
    lone.plan.shard_ranks = 0;  // the all-reduce over replicas is in place: no memory
    lone.plan.microbatches = job.plan.microbatches > 1 ? 2 : 1;
    DataOptions data = data_options(lone);
    if (job.plan.ep > 1) data.experts = edp_.get();
    if (auto* const diloco = std::get_if<DilocoOptions>(&data.strategy)) diloco->context = cp_.get();
    return {.plan = job.plan,
            .schedule = one_after_another(sizes_.schedule.stages, static_cast<int>(lone.plan.microbatches), split),
            .layers = std::move(layers),
            .data = data,
            .sequences = sizes_.sequences,
            .arena = arena_};
  }
  void sample() {
    samples_.push_back({arena_->total().live, arena_->total().peak, arena_->usage(Category::communication).peak});
    arena_->reset_peaks();
  }
  Tensor tokens(int64_t sequences, int64_t length) {
    Tensor made = Tensor::empty({sequences, length}, DType::int32, arena_);
    std::memset(made.raw(), 0, static_cast<size_t>(made.nbytes()));
    return made;
  }
  Tensor tokens() { return tokens(sizes_.sequences, sizes_.tokens); }
  // With DataParallel the first rank loads the ids of all ranks, the others none.
  Tensor loaded() {
    if (!through_root_) return tokens();
    if (data_->rank() > 0) return Tensor::meta({sizes_.sequences, sizes_.tokens}, DType::int32);
    return tokens(data_->size() * sizes_.sequences, sizes_.tokens);
  }
  Microbatch load(int64_t, bool ids, bool targets) override {
    const Microbatch both{loaded(), loaded()};
    return {ids ? both.ids : Tensor(), targets ? both.targets : Tensor()};
  }
  int64_t columns(int64_t) const override { return sizes_.tokens; }
  StepInfo where(int64_t) override {
    sample();
    StepInfo at{.seed = 1, .training = true};
    at.positions = part_.positions();
    at.tokens_total = part_.model().config.context;
    if (sizes_.documents) {
      const Tensor all = tokens(sizes_.sequences, at.tokens_total);
      at.documents = {sizes_.plan.cp_mode == ContextMode::ulysses ? all : tokens(), tokens()};
    }
    return at;
  }

  const PlanSizes& sizes_;
  bool through_root_;
  std::unique_ptr<Communicator> tp_, cp_, pp_, data_, ep_, edp_;
  std::unique_ptr<LanguageModel> full_model_;
  ArenaPtr arena_ = host_arena_for(sizes_.plan);
  std::vector<Sample> samples_;
  ModelPart part_;
};

// The first step packs weights and is otherwise ignored. In the second, the first micro-batch may include prefetched
// data for the next, and the last one accumulates onto the gradients of the first.
void measure(DryRunRank& rank, int64_t handed, std::vector<StageMemory>& out) {
  const std::vector<Sample> first = rank.step(), then = rank.step();
  const Schedule& list = rank.list();
  std::vector<int64_t> packs(out.size(), 0);
  for (size_t i = 0; i < list.actions[0].size(); ++i) {
    const auto [what, stage, microbatch] = list.actions[0][i];
    const int64_t before = then[i].live, after = then[i + 1].live, peak = then[i + 1].peak;
    const int64_t below = stage > 0 ? handed : 0, above = stage + 1 < list.stages ? handed : 0;
    StageMemory& m = out[static_cast<size_t>(stage)];
    packs[static_cast<size_t>(stage)] += first[i + 1].live - first[i].live - (after - before);
    if (what == PassKind::F) {
      m.forward = std::max(m.forward, peak - (before - below));
      m.saved = after - above - (before - below);
    } else if (what == PassKind::B) {
      m.backward = std::max(m.backward, peak - (before - m.saved - above));
    } else if (what == PassKind::I) {
      m.input = std::max(m.input, peak - (before - m.saved - above));
      m.deferred = after - below - (before - m.saved - above);
    } else {
      m.weight = std::max(m.weight, peak - (before - m.deferred));
    }
  }
  int64_t moved = 0;
  for (const Sample& s : then) moved = std::max(moved, s.communication);
  for (size_t stage = 0; stage < out.size(); ++stage) {
    out[stage].packs = std::max(out[stage].packs, packs[stage]);
    out[stage].communication = std::max(out[stage].communication, moved);
  }
}

// Ranks of a ring that together show the maximum of every hop. A hop has all queries and the first half of the keys
// (last rank), or the second half of the queries and all keys (first rank); which is larger depends on heads and
// dtypes.
std::vector<int> unlike_cp_ranks(const Plan& plan) {
  if (plan.cp == 1 || plan.cp_mode == ContextMode::ulysses) return {0};
  return {0, static_cast<int>(plan.cp) - 1};
}

std::vector<StageMemory> measure_all(const TrainConfig& job, std::optional<int> data_rank, const Schedule& plan,
                                     const std::vector<Range>& layers = {}) {
  const PlanSizes sizes(job);
  std::vector<StageMemory> out(layers.empty() ? static_cast<size_t>(plan.stages) : layers.size());
  for (const bool split : {false, true})
    for (const int cp_rank : unlike_cp_ranks(job.plan))
      if (plan.has(split ? PassKind::I : PassKind::B)) {
        DryRunRank rank(job, sizes, split, data_rank, cp_rank, layers);
        measure(rank, handed_bytes(job), out);
      }
  return out;
}

// Measures the first, a middle and the last stage.
std::vector<StageMemory> measure_short(TrainConfig job, std::optional<int> data_rank, const Schedule& plan,
                                       int64_t each) {
  job.plan.pp = std::min(3, plan.stages);
  job.plan.schedule = ScheduleKind::gpipe;
  job.plan.schedule_file.clear();
  job.plan.chunks = 0;
  job.model.layers = job.plan.pp * each;
  std::vector<Range> layers;
  for (int64_t s = 0; s < job.plan.pp; ++s) layers.push_back({s * each, (s + 1) * each});
  return measure_all(job, data_rank, plan, layers);
}

// ZeRO-3 holds up to four layers at a time, so the extrapolation starts at four.
StageMemory after(const StageMemory& four, const StageMemory& five, int64_t layers) {
  StageMemory out;
  for (int64_t StageMemory::*const field :
       {&StageMemory::saved, &StageMemory::deferred, &StageMemory::forward, &StageMemory::backward, &StageMemory::input,
        &StageMemory::weight, &StageMemory::packs, &StageMemory::communication})
    out.*field = four.*field + (layers - 4) * (five.*field - four.*field);
  return out;
}

}  // namespace

int64_t handed_bytes(const TrainConfig& job) {
  const Plan& p = job.plan;
  return handed_elements(p, job.optim.batch / (p.dp * p.microbatches), job.model.context, job.model.channels) *
         element_size(data_options(job).dtype);
}

std::vector<StageMemory> measure_stages(const TrainConfig& job, std::optional<int> data_rank, bool alike) {
  const cpu::DryRun nothing_is_computed;
  const Schedule plan = shortest_schedule(job.plan);
  const std::vector<Range> layers = split_layers(*full_model(job, job.model.vocab), plan.stages);
  const bool is_short = std::ranges::all_of(layers, [](const Range& r) { return r.size() <= 5; });
  if (!alike || is_short) return measure_all(job, data_rank, plan);
  const std::vector<StageMemory> four = measure_short(job, data_rank, plan, 4),
                                 five = measure_short(job, data_rank, plan, 5);
  std::vector<StageMemory> out;
  for (size_t s = 0; s < layers.size(); ++s) {
    const size_t kind = s == 0 ? 0 : s + 1 == layers.size() ? four.size() - 1 : 1;
    out.push_back(after(four[kind], five[kind], layers[s].size()));
  }
  return out;
}

std::vector<int64_t> peaks_of_ranks(const Schedule& plan, const std::vector<StageMemory>& stages, int64_t handed) {
  std::vector<int64_t> out;
  for (size_t rank = 0; rank < plan.actions.size(); ++rank) {
    int64_t live = 0, peak = 0;
    for (int stage = 0; stage < plan.stages; ++stage)
      if (plan.rank_of_stage[static_cast<size_t>(stage)] == static_cast<int>(rank))
        live += stages[static_cast<size_t>(stage)].packs;
    for (const Action& a : plan.actions[rank]) {
      if (a.what > PassKind::W) continue;  // message buffers are included in the passes
      const StageMemory& m = stages[static_cast<size_t>(a.stage)];
      // Between two stages on this rank, an activation is stored instead of sent.
      const int64_t below = a.stage > 0 && !plan.crosses(a.stage - 1) ? handed : 0,
                    above = a.stage + 1 < plan.stages && !plan.crosses(a.stage) ? handed : 0;
      if (a.what == PassKind::F) {
        peak = std::max(peak, live - below + m.forward);
        live += m.saved - below + above;
      } else if (a.what == PassKind::W) {
        live -= m.deferred;
        peak = std::max(peak, live + m.weight);
      } else {
        live -= m.saved + above;
        peak = std::max(peak, live + (a.what == PassKind::I ? m.input : m.backward));
        live += below + (a.what == PassKind::I ? m.deferred : 0);
      }
    }
    out.push_back(peak);
  }
  return out;
}

}  // namespace tessera
