// A pipeline on one rank, looked at between its passes.
#include "app/verify/stage_memory.h"

#include <algorithm>
#include <memory>
#include <string>

#include "app/plan.h"
#include "app/verify/plan_sizes.h"
#include "models/gpt_parallel.h"
#include "models/gpt_stages.h"
#include "parallel/comm/fake_transport.h"
#include "parallel/pipeline/passes.h"
#include "parallel/pipeline/runtime.h"

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
  LoneRank(const TrainOptions& o, const GptConfig& config, bool split)
      : options_(o),
        sizes_(o, config),
        tp_(first_of(sizes_.axes.tp, "tp")),
        cp_(first_of(sizes_.axes.cp, "cp")),
        alone_(first_of(1, "dp")),
        list_(one_after_another(sizes_.schedule.stages, o.microbatches > 1 ? 2 : 1, split)),
        model_(of_stages(config)) {
    const bool ring = o.cp_mode == "ring";
    if (cp_->size() > 1)
      positions_ = context_positions(config.context, cp_->size(), 0, ring ? Balance::zigzag : Balance::contiguous);
    tensor_parallel(model_, *tp_, o.sp ? S(1, sizes_.tokens) : I);
    context_parallel(model_, *cp_, ring ? ContextMode::ring : ContextMode::ulysses);
    DataOptions data = data_options(o);
    data.mode = "ddp";
    data.zero = 0;
    data.copies = 1;
    data.microbatches = list_.microbatches;
    strategy_ = make_data_strategy(model_, *alone_, arena_, data);
    stages_ = std::make_unique<GptStages>(model_, *strategy_, stage_options(config));
    runtime_ = std::make_unique<PipelineRuntime>(list_, *alone_, *stages_);
  }

  const Schedule& list() const { return list_; }
  // A step, and a sample for the beginning of each pass and for the end.
  std::vector<Sample> step() {
    samples_.clear();
    strategy_->begin_step();
    runtime_->step();
    sample();
    strategy_->finish_gradients();
    return samples_;
  }

 private:
  GptConfig of_stages(GptConfig config) const {
    config.tied = sizes_.schedule.stages == 1;
    return config;
  }
  void sample() {
    samples_.push_back({arena_->total().live, arena_->total().peak});
    arena_->reset_peaks();
  }
  Tensor tokens() const {
    const Tensor whole = Tensor::zeros({sizes_.sequences, model_.config.context}, DType::int32, arena_);
    return cp_->size() > 1 ? whole.narrow(1, 0, sizes_.tokens).clone() : whole;
  }
  Microbatch load(bool ids, bool targets) const {
    const Microbatch both{tokens(), tokens()};
    return {ids ? both.ids : Tensor(), targets ? both.targets : Tensor()};
  }
  StepInfo where() {
    sample();
    StepInfo at{.seed = 1, .training = true};
    at.positions = positions_;
    at.tokens_total = model_.config.context;
    return at;
  }
  GptStages::Options stage_options(const GptConfig& config) {
    return {.layers = split_layers(config, sizes_.schedule.stages),
            .loss = [this](const Var& hidden, const Tensor& targets,
                           double scale) { return parallel_loss(model_, hidden, targets, scale, *tp_); },
            .load = [this](int64_t, bool ids, bool targets) { return load(ids, targets); },
            .where = [this](int64_t) { return where(); },
            .activation = {sizes_.sequences, sizes_.tokens / (options_.sp ? sizes_.axes.tp : 1), config.channels},
            .dtype = dtype_named(options_.dtype),
            .arena = arena_};
  }

  const TrainOptions& options_;
  PlanSizes sizes_;
  std::unique_ptr<Communicator> tp_, cp_, alone_;
  Schedule list_;
  ArenaPtr arena_ = make_arena();
  Gpt model_;
  std::vector<int64_t> positions_;
  std::vector<Sample> samples_;
  std::unique_ptr<DataStrategy> strategy_;
  std::unique_ptr<GptStages> stages_;
  std::unique_ptr<PipelineRuntime> runtime_;
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

int64_t handed_bytes(const TrainOptions& o, const GptConfig& config) {
  const PlanSizes s(o, config);
  return s.micro_elements(config) / (o.sp ? s.axes.tp : 1) * s.value;
}

std::vector<StageMemory> measure_stages(const TrainOptions& o, const GptConfig& config) {
  const Schedule plan = schedule_of(o);
  std::vector<StageMemory> out(static_cast<size_t>(plan.stages));
  for (const bool split : {false, true})
    if (plan.has(split ? Do::I : Do::B)) {
      LoneRank rank(o, config, split);
      measure(rank, handed_bytes(o, config), out);
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
