// Steps of a pipeline without an optimizer, and medians of what their actions took.
#include "bench/main/gpt_pipeline.h"

#include <algorithm>
#include <array>
#include <ctime>
#include <memory>
#include <string>
#include <utility>

#include "parallel/comm/launch.h"
#include "parallel/comm/trace.h"
#include "parallel/mesh.h"
#include "parallel/pipeline/passes.h"
#include "parallel/pipeline/replay.h"
#include "tensor/random.h"
#include "train/model_part.h"

namespace tessera {
namespace {

constexpr std::array<Do, 4> kPasses{Do::F, Do::B, Do::I, Do::W};
constexpr double kTimeout = 60;
// Of a step on one rank: the first is left out.
constexpr int kMicrobatches = 3;

double median(std::vector<double> x) {
  if (x.empty()) return 0;
  std::sort(x.begin(), x.end());
  return x[x.size() / 2];
}

double processor_seconds() { return static_cast<double>(std::clock()) / CLOCKS_PER_SEC; }

// Seconds of every pass, by stage and kind.
class PassTimes {
 public:
  explicit PassTimes(int stages) : seconds_(static_cast<size_t>(stages)) {}
  void add(const Action& a, double seconds) {
    seconds_[static_cast<size_t>(a.stage)][static_cast<size_t>(a.what)].push_back(seconds);
  }
  // Medians by stage and kind, 0 for what never was.
  std::vector<double> medians() const {
    std::vector<double> out;
    for (const auto& stage : seconds_)
      for (const std::vector<double>& kind : stage) out.push_back(median(kind));
    return out;
  }

 private:
  std::vector<std::array<std::vector<double>, kPasses.size()>> seconds_;
};

std::vector<StageTimes> stage_times(const std::vector<double>& medians) {
  std::vector<StageTimes> out;
  for (size_t i = 0; i < medians.size(); i += kPasses.size())
    out.push_back(
        {.forward = medians[i], .backward = medians[i + 1], .input = medians[i + 2], .weight = medians[i + 3]});
  return out;
}

// One rank of a pipeline over all of `world`.
class GptPipeline {
 public:
  GptPipeline(const PipelineCase& what, const Schedule& schedule, Communicator& world)
      : what_(what),
        mesh_(world, {{"pp", world.size()}, {"dp", 1}}),
        tokens_(some_tokens()),
        passes_(schedule.stages),
        part_(*make_model(what.model), make_model, {mesh_["pp"], mesh_["dp"], mesh_["dp"], mesh_["dp"]},
              options(schedule)) {}

  // What all ranks did and when, on every rank. They are threads, so their clocks are one.
  TimedLists step() {
    part_.strategy().begin_step();
    part_.runtime().step();
    part_.strategy().finish_gradients();
    const std::vector<TraceEvent> events = trace_.events();
    const std::vector<std::vector<Action>>& plan = part_.runtime().schedule().actions;
    std::vector<double> times;  // of all ranks' actions, begin and end
    for (size_t rank = 0; rank < plan.size(); ++rank)
      for (size_t i = 0; i < plan[rank].size(); ++i) {
        const bool own = static_cast<int>(rank) == mesh_["pp"].rank();
        times.push_back(own ? trace_.origin() + events[seen_].begin : 0);
        times.push_back(own ? trace_.origin() + events[seen_++].end : 0);
      }
    mesh_["pp"].sum(times);
    TimedLists out(plan.size());
    size_t at = 0;
    for (size_t rank = 0; rank < plan.size(); ++rank)
      for (const Action& action : plan[rank]) {
        out[rank].push_back({action, times[at], times[at + 1]});
        at += 2;
      }
    return out;
  }
  // The same on one rank, in time of the processor: a machine that is shared does not lengthen it.
  void step_alone() {
    part_.strategy().begin_step();
    entered_.clear();
    part_.runtime().step();
    entered_.push_back(processor_seconds());
    part_.strategy().finish_gradients();
    const std::vector<Action>& list = part_.runtime().schedule().actions[0];
    for (size_t i = 0; i < list.size(); ++i)
      if (list[i].microbatch > 0) passes_.add(list[i], entered_[i + 1] - entered_[i]);
  }
  // Of all steps since forget(), without the first micro-batch of each.
  std::vector<double> medians() const { return passes_.medians(); }
  void forget() { passes_ = PassTimes(part_.schedule().stages); }

 private:
  Microbatch some_tokens() const {
    const Shape shape{what_.sequences, what_.model.context};
    Microbatch out{Tensor::empty(shape, DType::int32, arena_), Tensor::empty(shape, DType::int32, arena_)};
    const Philox random = Philox::named(1, "tokens");
    const auto vocab = static_cast<uint64_t>(what_.model.vocab);
    for (int64_t i = 0; i < out.ids.numel(); ++i) {
      out.ids.data<int32_t>()[i] = static_cast<int32_t>(random.below(vocab, static_cast<uint64_t>(2 * i)));
      out.targets.data<int32_t>()[i] = static_cast<int32_t>(random.below(vocab, static_cast<uint64_t>(2 * i + 1)));
    }
    return out;
  }

  // The stages ask at the beginning of each pass.
  StepInfo enter_pass() {
    entered_.push_back(processor_seconds());
    return {.seed = 1, .training = true, .tokens_total = what_.model.context};
  }

  ModelPart::Options options(const Schedule& schedule) {
    return {.schedule = schedule,
            .data = {.microbatches = schedule.microbatches},
            .sequences = what_.sequences,
            .scale = 1.0 / static_cast<double>(tokens_.ids.numel()),
            .load = [this](int64_t, bool, bool) { return tokens_; },
            .where = [this](int64_t) { return enter_pass(); },
            .arena = arena_,
            .trace = &trace_};
  }

  const PipelineCase& what_;
  Mesh mesh_;
  ArenaPtr arena_ = make_arena();
  Microbatch tokens_;
  Trace trace_;
  size_t seen_ = 0;              // events of the trace
  std::vector<double> entered_;  // when each pass of the step began
  PassTimes passes_;
  ModelPart part_;
};

// One micro-batch after another through all stages on one rank.
Schedule one_after_another(int stages) {
  Schedule s = empty_schedule("one after another", 1, stages, kMicrobatches);
  for (int i = 0; i < kMicrobatches; ++i) {
    for (int stage = 0; stage < stages; ++stage) s.actions[0].push_back({Do::F, stage, i});
    for (int stage = stages; stage-- > 0;) s.actions[0].push_back({Do::B, stage, i});
  }
  return s;
}

using Pipelines = std::vector<std::unique_ptr<GptPipeline>>;

Pipelines make_pipelines(const PipelineCase& what, const std::vector<Schedule>& schedules, Communicator& world) {
  Pipelines out;
  for (const Schedule& schedule : schedules) out.push_back(std::make_unique<GptPipeline>(what, schedule, world));
  return out;
}

}  // namespace

std::vector<std::vector<StageTimes>> time_stages(const PipelineCase& what, const std::vector<int>& stages) {
  std::vector<Schedule> schedules;  // of each number of stages whole, then split
  for (const int s : stages)
    for (const Schedule& one : {one_after_another(s), split_backward(one_after_another(s))}) schedules.push_back(one);
  std::vector<std::vector<StageTimes>> out;
  launch({.ranks = 1, .threads_per_rank = 1, .timeout_s = kTimeout}, [&](Communicator& world) {
    const Pipelines pipelines = make_pipelines(what, schedules, world);
    for (int round = -1; round < what.rounds; ++round)
      for (const auto& pipeline : pipelines) {
        pipeline->step_alone();
        if (round < 0) pipeline->forget();
      }
    for (size_t i = 0; i < pipelines.size(); i += 2) {
      std::vector<StageTimes> whole = stage_times(pipelines[i]->medians());
      const std::vector<StageTimes> split = stage_times(pipelines[i + 1]->medians());
      for (size_t s = 0; s < whole.size(); ++s) {
        whole[s].input = split[s].input;
        whole[s].weight = split[s].weight;
      }
      out.push_back(std::move(whole));
    }
  });
  return out;
}

std::vector<PipelineRun> run_pipelines(const PipelineCase& what, const std::vector<Schedule>& schedules) {
  std::vector<PipelineRun> out(schedules.size());
  launch({.ranks = schedules.at(0).ranks, .threads_per_rank = 1, .timeout_s = kTimeout}, [&](Communicator& world) {
    const Pipelines pipelines = make_pipelines(what, schedules, world);
    struct Figures {
      std::vector<double> seconds, bubbles, replayed;
    };
    std::vector<Figures> of(schedules.size());
    for (int round = -1; round < what.rounds; ++round)
      for (size_t i = 0; i < pipelines.size(); ++i) {
        world.barrier();
        const TimedLists lists = pipelines[i]->step();
        if (round < 0) continue;
        const Simulation measured = as_measured(schedules[i], lists),
                         replayed = simulate(schedules[i], times_of(schedules[i], lists));
        of[i].seconds.push_back(measured.makespan);
        of[i].bubbles.push_back(measured.bubble_share());
        of[i].replayed.push_back(replayed.bubble_share());
      }
    if (world.rank() != 0) return;
    for (size_t i = 0; i < out.size(); ++i)
      out[i] = {median(of[i].seconds), median(of[i].bubbles), median(of[i].replayed)};
  });
  return out;
}

}  // namespace tessera
