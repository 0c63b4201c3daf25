// A pipeline on one rank, looked at between its passes.
#include "verify/stage_memory.h"

#include <algorithm>
#include <memory>
#include <string>

#include "parallel/pipeline/passes.h"
#include "train/model_part.h"
#include "verify/fake_transport.h"
#include "verify/plan_sizes.h"

namespace tessera {
namespace {

std::unique_ptr<Communicator> first_of(int64_t ranks, const std::string& axis) {
  return std::make_unique<Communicator>(std::make_unique<FakeTransport>(0, static_cast<int>(ranks)), axis);
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
  int64_t live = 0, peak = 0;
};

// The ranks that it would speak to send nothing: numbers are whatever memory held, sizes are right.
class LoneRank {
 public:
  LoneRank(const Job& job, bool split)
      : sizes_(job),
        tp_(first_of(sizes_.plan.tp, "tp")),
        cp_(first_of(sizes_.plan.cp, "cp")),
        alone_(first_of(1, "dp")),
        whole_(job.make(sizes_.config)),
        part_(*whole_, job.make, {*alone_, *alone_, *cp_, *tp_}, options(job, split)) {}

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
  ModelPart::Options options(const Job& job, bool split) {
    Job lone = job;
    lone.plan.dp_mode = DataMode::ddp;
    lone.plan.zero = ZeroStage::none;
    lone.plan.cp = 1;
    lone.plan.microbatches = job.plan.microbatches > 1 ? 2 : 1;
    return {.schedule = one_after_another(sizes_.schedule.stages, static_cast<int>(lone.plan.microbatches), split),
            .cp_mode = job.plan.cp_mode,
            .sp = job.plan.sp,
            .tie_copies = job.plan.tie_copies,
            .data = data_options(lone),
            .sequences = sizes_.sequences,
            .load = [this](int64_t, bool ids, bool targets) { return load(ids, targets); },
            .where = [this](int64_t) { return where(); },
            .arena = arena_};
  }
  void sample() {
    samples_.push_back({arena_->total().live, arena_->total().peak});
    arena_->reset_peaks();
  }
  Tensor tokens() {
    const Tensor whole = Tensor::zeros({sizes_.sequences, part_.model().config.context}, DType::int32, arena_);
    return cp_->size() > 1 ? whole.narrow(1, 0, sizes_.tokens).clone() : whole;
  }
  Microbatch load(bool ids, bool targets) {
    const Microbatch both{tokens(), tokens()};
    return {ids ? both.ids : Tensor(), targets ? both.targets : Tensor()};
  }
  StepInfo where() {
    sample();
    StepInfo at{.seed = 1, .training = true};
    at.positions = part_.positions();
    at.tokens_total = part_.model().config.context;
    if (sizes_.documents) {
      const Tensor all = Tensor::zeros({sizes_.sequences, at.tokens_total}, DType::int32, arena_);
      at.documents = {sizes_.plan.cp_mode == ContextMode::ulysses ? all : tokens(), tokens()};
    }
    return at;
  }

  PlanSizes sizes_;
  std::unique_ptr<Communicator> tp_, cp_, alone_;
  std::unique_ptr<LanguageModel> whole_;
  ArenaPtr arena_ = make_arena();
  std::vector<Sample> samples_;
  ModelPart part_;
};

// The first step packs weights and is not looked at otherwise; of the second one the last micro-batch counts, whose
// gradients are made beside those of the first.
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
      m.forward = peak - (before - below);
      m.kept = after - above - (before - below);
    } else if (what == Do::B) {
      m.backward = peak - (before - m.kept - above);
    } else if (what == Do::I) {
      m.input = peak - (before - m.kept - above);
      m.deferred = after - below - (before - m.kept - above);
    } else {
      m.weight = peak - (before - m.deferred);
    }
  }
  for (size_t stage = 0; stage < out.size(); ++stage) out[stage].packs = std::max(out[stage].packs, packs[stage]);
}

}  // namespace

int64_t handed_bytes(const Job& job) {
  const PlanSizes s(job);
  return s.micro_elements() / (s.plan.sp ? s.plan.tp : 1) * s.value;
}

std::vector<StageMemory> measure_stages(const Job& job) {
  const Schedule plan = schedule_of(job.plan);
  std::vector<StageMemory> out(static_cast<size_t>(plan.stages));
  for (const bool split : {false, true})
    if (plan.has(split ? Do::I : Do::B)) {
      LoneRank rank(job, split);
      measure(rank, handed_bytes(job), out);
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
