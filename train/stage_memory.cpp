// A pipeline on one rank, looked at between its passes.
#include "train/stage_memory.h"

#include <algorithm>
#include <cstring>
#include <memory>
#include <string>

#include "parallel/comm/fake_transport.h"
#include "parallel/pipeline/passes.h"
#include "tensor/cpu/stands_for.h"
#include "tensor/cpu/vectorize.h"
#include "train/model_part.h"
#include "train/plan_sizes.h"

namespace tessera {
namespace {

std::unique_ptr<Communicator> alone_on(const std::string& axis, int64_t ranks, int rank = 0) {
  return std::make_unique<Communicator>(std::make_unique<FakeTransport>(rank, static_cast<int>(ranks), "threads"),
                                        axis);
}

// One micro-batch after another, through all stages and back, with whole backward passes or split ones.
Schedule one_after_another(int stages, int microbatches, bool split) {
  Schedule s = empty_schedule("one after another", 1, stages, microbatches);
  for (int i = 0; i < microbatches; ++i) {
    for (int stage = 0; stage < stages; ++stage) s.actions[0].push_back({Do::F, stage, i});
    for (int stage = stages; stage-- > 0;) s.actions[0].push_back({Do::B, stage, i});
  }
  return split ? split_backward(s) : s;
}

// Of the arena, at the beginning of a pass: what is live, and the most that was since the pass before began.
struct Sample {
  int64_t live = 0, peak = 0, communication = 0;
};

// A host's arena whose ops take what they would take on `device`.
ArenaPtr host_arena_for(Device device) {
  ArenaPtr arena = make_arena();
  arena->local<StandsFor>().device = device;
  return arena;
}

// Without the strategy of the data axis: the plainest one, alone.
Job without_strategy(Job job) {
  job.plan.dp_mode = DataMode::ddp;
  job.plan.zero = ZeroStage::none;
  return job;
}

// The ranks that it would speak to send nothing: numbers are whatever memory held, sizes are right.
class LoneRank {
 public:
  LoneRank(const Job& job, bool split, std::optional<int> data_rank, int cp_rank, std::vector<Range> layers)
      : sizes_(job),
        through_root_(data_rank && job.plan.dp_mode == DataMode::dataparallel),
        tp_(alone_on("tp", sizes_.plan.tp, sizes_.largest_tp_rank())),
        cp_(alone_on("cp", sizes_.plan.cp, cp_rank)),
        pp_(alone_on("pp", 1)),
        data_(alone_on("dp", data_rank ? shared(job) : 1, data_rank.value_or(0))),
        ep_(alone_on("ep", sizes_.plan.ep)),
        edp_(alone_on("edp", data_rank ? shared(job) / sizes_.plan.ep : 1)),
        whole_(job.make(sizes_.config)),
        part_(*whole_, job.make, {*pp_, *data_, *cp_, *tp_, ep_.get()},
              options(data_rank ? job : without_strategy(job), split, std::move(layers))) {}

  const Schedule& list() const { return part_.schedule(); }
  // A step, and a sample for the beginning of each pass and for the end.
  std::vector<Sample> step() {
    samples_.clear();
    part_.strategy().begin_step();
    part_.runtime().step();
    sample();
    part_.strategy().finish_gradients();
    return samples_;
  }

 private:
  int64_t shared(const Job& job) const { return job.plan.shard_ranks > 0 ? sizes_.cut : sizes_.data; }
  ModelPart::Options options(const Job& job, bool split, std::vector<Range> layers) {
    Job lone = job;
    if (data_->size() < sizes_.data) lone.plan.cp = 1;
    lone.plan.shard_ranks = 0;  // sums over groups are made in place
    lone.plan.microbatches = job.plan.microbatches > 1 ? 2 : 1;
    DataOptions data = data_options(lone);
    if (job.plan.ep > 1) data.experts = edp_.get();
    data.context = cp_.get();
    return {.schedule = one_after_another(sizes_.schedule.stages, static_cast<int>(lone.plan.microbatches), split),
            .layers = std::move(layers),
            .cp_mode = job.plan.cp_mode,
            .sp = job.plan.sp,
            .tie_copies = job.plan.tie_copies,
            .data = data,
            .sequences = sizes_.sequences,
            .load = [this](int64_t, bool ids, bool targets) { return load(ids, targets); },
            .where = [this](int64_t) { return where(); },
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
  // Of DataParallel the first rank loads those of all ranks, and the others none.
  Tensor loaded() {
    if (!through_root_) return tokens();
    if (data_->rank() > 0) return Tensor::meta({sizes_.sequences, sizes_.tokens}, DType::int32);
    return tokens(data_->size() * sizes_.sequences, sizes_.tokens);
  }
  Microbatch load(bool ids, bool targets) {
    const Microbatch both{loaded(), loaded()};
    return {ids ? both.ids : Tensor(), targets ? both.targets : Tensor()};
  }
  StepInfo where() {
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

  PlanSizes sizes_;
  bool through_root_;
  std::unique_ptr<Communicator> tp_, cp_, pp_, data_, ep_, edp_;
  std::unique_ptr<LanguageModel> whole_;
  ArenaPtr arena_ = host_arena_for(sizes_.plan.device);
  std::vector<Sample> samples_;
  ModelPart part_;
};

// The first step packs weights and is not looked at otherwise. Of the second one the first micro-batch may hold what
// was fetched for the next, and the last one makes its gradients beside those of the first.
void measure(LoneRank& rank, int64_t handed, std::vector<StageMemory>& out) {
  const std::vector<Sample> first = rank.step(), then = rank.step();
  const Schedule& list = rank.list();
  std::vector<int64_t> packs(out.size(), 0);
  for (size_t i = 0; i < list.actions[0].size(); ++i) {
    const auto [what, stage, microbatch] = list.actions[0][i];
    const int64_t before = then[i].live, after = then[i + 1].live, peak = then[i + 1].peak;
    const int64_t below = stage > 0 ? handed : 0, above = stage + 1 < list.stages ? handed : 0;
    StageMemory& m = out[static_cast<size_t>(stage)];
    packs[static_cast<size_t>(stage)] += first[i + 1].live - first[i].live - (after - before);
    if (what == Do::F) {
      m.forward = std::max(m.forward, peak - (before - below));
      m.kept = after - above - (before - below);
    } else if (what == Do::B) {
      m.backward = std::max(m.backward, peak - (before - m.kept - above));
    } else if (what == Do::I) {
      m.input = std::max(m.input, peak - (before - m.kept - above));
      m.deferred = after - below - (before - m.kept - above);
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

// Ranks of a ring between which every hop takes what it takes anywhere. A hop has all queries and the keys' first half,
// as on the last rank, or the queries' second half and all keys, as on the first; which is more depends on heads and
// dtypes.
std::vector<int> unlike_cp_ranks(const Plan& plan) {
  if (plan.cp == 1 || plan.cp_mode == ContextMode::ulysses) return {0};
  return {0, static_cast<int>(plan.cp) - 1};
}

std::vector<StageMemory> measure_all(const Job& job, std::optional<int> data_rank, const Schedule& plan,
                                     const std::vector<Range>& layers = {}) {
  std::vector<StageMemory> out(layers.empty() ? static_cast<size_t>(plan.stages) : layers.size());
  for (const bool split : {false, true})
    for (const int cp_rank : unlike_cp_ranks(job.plan))
      if (plan.has(split ? Do::I : Do::B)) {
        LoneRank rank(job, split, data_rank, cp_rank, layers);
        measure(rank, handed_bytes(job), out);
      }
  return out;
}

// The first, a middle and the last stage, of so many layers each.
std::vector<StageMemory> measure_short(Job job, std::optional<int> data_rank, const Schedule& plan, int64_t each) {
  job.plan.pp = std::min(3, plan.stages);
  job.plan.schedule = ScheduleKind::gpipe;
  job.plan.schedule_file.clear();
  job.plan.chunks = 0;
  job.model.layers = job.plan.pp * each;
  std::vector<Range> layers;
  for (int64_t s = 0; s < job.plan.pp; ++s) layers.push_back({s * each, (s + 1) * each});
  return measure_all(job, data_rank, plan, layers);
}

// ZeRO-3 holds up to four layers at a time, so that fewer are no measure.
StageMemory after(const StageMemory& four, const StageMemory& five, int64_t layers) {
  const auto follow = [&](int64_t StageMemory::*field) {
    return four.*field + (layers - 4) * (five.*field - four.*field);
  };
  return {.kept = follow(&StageMemory::kept),
          .deferred = follow(&StageMemory::deferred),
          .forward = follow(&StageMemory::forward),
          .backward = follow(&StageMemory::backward),
          .input = follow(&StageMemory::input),
          .weight = follow(&StageMemory::weight),
          .packs = follow(&StageMemory::packs),
          .communication = follow(&StageMemory::communication)};
}

}  // namespace

int64_t handed_bytes(const Job& job) {
  const Plan& p = job.plan;
  const int64_t tokens = job.optim.batch / (p.dp * p.microbatches) * (job.model.context / p.cp / (p.sp ? p.tp : 1));
  return tokens * job.model.channels * size_of(data_options(job).dtype);
}

std::vector<StageMemory> measure_stages(const Job& job, std::optional<int> data_rank, bool alike) {
  const cpu::Idle nothing_is_computed;
  const Schedule plan = schedule_of(job.plan);
  const std::vector<Range> layers = split_layers(*whole_model(job, job.model.vocab), plan.stages);
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
      if (a.what > Do::W) continue;  // messages are made of what passes hold
      const StageMemory& m = stages[static_cast<size_t>(a.stage)];
      // Between neighbours on one rank a value waits here.
      const int64_t below = a.stage > 0 && !plan.crosses(a.stage - 1) ? handed : 0,
                    above = a.stage + 1 < plan.stages && !plan.crosses(a.stage) ? handed : 0;
      if (a.what == Do::F) {
        peak = std::max(peak, live - below + m.forward);
        live += m.kept - below + above;
      } else if (a.what == Do::W) {
        live -= m.deferred;
        peak = std::max(peak, live + m.weight);
      } else {
        live -= m.kept + above;
        peak = std::max(peak, live + (a.what == Do::I ? m.input : m.backward));
        live += below + (a.what == Do::I ? m.deferred : 0);
      }
    }
    out.push_back(peak);
  }
  return out;
}

}  // namespace tessera
