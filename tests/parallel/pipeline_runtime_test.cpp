// The pipeline runtime: under each schedule weights are bitwise identical to one rank that processes micro-batches
// sequentially; messages and memory match the closed forms and the simulation.
#include <algorithm>
#include <cstdint>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "nn/layers.h"
#include "parallel/comm/launch.h"
#include "parallel/pipeline/runtime.h"
#include "parallel/pipeline/simulate.h"
#include "parallel/pipeline/validate.h"
#include "tests/parallel/schedules.h"
#include "tests/support/tensors.h"

namespace tessera {
namespace {

using namespace test;

constexpr int64_t kTokens = 3, kChannels = 6;

Tensor normal(const std::string& name, int microbatch, const ArenaPtr& arena) {
  const std::string numbered = name + " " + std::to_string(microbatch);
  return test::normal({kTokens, kChannels}, DType::float32, 5, numbered.c_str(), arena);
}

// y = x + down(gelu(up(norm(x)))): a residual stream, so that gradients have several uses across the boundary.
struct Layer : Module {
  LayerNorm& norm = child<LayerNorm>("norm", kChannels);
  Linear& up = child<Linear>("up", kChannels, kChannels,
                             Linear::Options{.deviation = 0.5, .activation = ActivationOptions{Activation::gelu}});
  Linear& down = child<Linear>("down", kChannels, kChannels, Linear::Options{.deviation = 0.5});
  Var forward(const Var& x) override { return add(x, down(up(norm(x)))); }
};

struct Variant {
  bool seeded = false;      // the last stage returns a seed instead of a loss
  bool recomputed = false;  // each stage but the first is checkpointed
};

struct Chain : Module {
  std::vector<Layer*> layers;
  explicit Chain(int stages) {
    for (int s = 0; s < stages; ++s) layers.push_back(&child<Layer>("layer" + std::to_string(s)));
  }
  Var stage(int s, const Var& x, const Variant& variant) {
    Layer& layer = *layers[static_cast<size_t>(s)];
    if (!variant.recomputed || s == 0) return layer(x);
    return checkpoint([&layer](const std::vector<Var>& in) { return layer(in[0]); }, {x});
  }
};

// The end of the last stage: a loss, or the value and the gradient of the same loss.
StageOutput finish(const Var& y, int microbatch, const Variant& variant) {
  const Tensor weights = normal("target", microbatch, y.value().arena());
  const Var loss = sum(y * Var(weights));
  const double value = loss.value().item<float>();
  if (variant.seeded) return {.value = y, .seed = weights, .loss_sum = value};
  return {.value = loss, .loss_sum = value};
}

class TestStages : public Stages {
 public:
  TestStages(Chain& chain, Variant variant, ArenaPtr arena)
      : chain_(chain), variant_(variant), arena_(std::move(arena)) {
    for (int s = 0; s < static_cast<int>(chain.layers.size()); ++s)
      for (const Parameter* p : chain.layers[static_cast<size_t>(s)]->parameters())
        Var(p->var).on_grad([this, s] {
          EXPECT_EQ(open_, s) << "a gradient came outside accumulate()";
          ++arrived;
        });
  }
  StageOutput forward(int stage, int microbatch, const Var& input) override {
    EXPECT_EQ(input.defined(), stage > 0);
    const Var y = chain_.stage(stage, stage > 0 ? input : Var(normal("input", microbatch, arena_)), variant_);
    if (stage + 1 < static_cast<int>(chain_.layers.size())) return {.value = y};
    return finish(y, microbatch, variant_);
  }
  Tensor make_activation(int, int) override { return Tensor::empty({kTokens, kChannels}, DType::float32, arena_); }
  void accumulate(int stage, int, const std::function<void()>& pass) override {
    open_ = stage;
    pass();
    EXPECT_EQ(std::exchange(open_, -1), stage);
  }
  int arrived = 0;

 private:
  Chain& chain_;
  Variant variant_;
  ArenaPtr arena_;
  int open_ = -1;
};

std::vector<std::vector<float>> gradients(Module& module) {
  std::vector<std::vector<float>> out;
  for (const Parameter* p : module.parameters()) out.push_back(p->var.grad().to_vector<float>());
  return out;
}

struct Made {
  ArenaPtr arena = make_arena();
  Chain chain;
  explicit Made(int stages) : chain(stages) {
    chain.materialize(3, arena, DType::float32, DType::float32);
    chain.clear_gradients();
  }
};

constexpr int kSteps = 2;

// One rank without a pipeline, with sequential micro-batches, for two accumulated steps. Returns the loss of a step.
double serial(Made& made, int microbatches, const Variant& variant) {
  double loss = 0;
  for (int step = 0; step < kSteps; ++step) {
    loss = 0;
    for (int i = 0; i < microbatches; ++i) {
      Var x(normal("input", i, made.arena));
      for (int s = 0; s < static_cast<int>(made.chain.layers.size()); ++s) x = made.chain.stage(s, x, variant);
      const StageOutput end = finish(x, i, variant);
      loss += end.loss_sum;
      backward(end.value, {.seed = end.seed});
    }
  }
  return loss;
}

void check_rank(Communicator& axis, const Schedule& schedule, const Variant& variant) {
  const std::string what = described(schedule) + " on rank " + std::to_string(axis.rank());
  Made expected(schedule.stages), made(schedule.stages);
  const double loss = serial(expected, schedule.microbatches, variant);
  TestStages stages(made.chain, variant, made.arena);
  PipelineRuntime pipe(schedule, axis, stages);
  axis.reset_counts();
  double got = 0;
  for (int step = 0; step < kSteps; ++step) got = pipe.step();

  int last = 0;
  for (int s = 0; s < schedule.stages; ++s) {
    if (schedule.rank_of_stage[static_cast<size_t>(s)] != axis.rank()) continue;
    const auto at = static_cast<size_t>(s);
    EXPECT_TRUE(gradients(*made.chain.layers[at]) == gradients(*expected.chain.layers[at])) << what << ", stage " << s;
    last += s + 1 == schedule.stages;
  }
  EXPECT_EQ(got, last ? loss : 0) << what;
  EXPECT_EQ(stages.arrived, kSteps * schedule.microbatches * schedule.chunks() * 6) << what;
  EXPECT_EQ(pipe.peak_in_flight(), simulate(schedule).in_flight[static_cast<size_t>(axis.rank())]) << what;
  const OpCount sent = axis.counts()[static_cast<size_t>(Op::send)];
  const double messages = 2.0 * schedule.wire_boundaries() * schedule.microbatches * kSteps;
  EXPECT_EQ(axis.sum(static_cast<double>(sent.calls)), messages) << what;
  EXPECT_EQ(axis.sum(static_cast<double>(sent.sent)), messages * kTokens * kChannels * 4) << what;
}

TEST(PipelineRuntime, EveryScheduleMatchesOneRankBitwise) {
  const Philox sample = Philox::named(9, "pipelines");
  uint64_t at = 0;
  for (int p = 1; p <= 4; ++p)
    for (int trial = 0; trial < 4; ++trial) {
      // Alternately any number and a multiple of p, for the interleaved schedule.
      const int m = trial % 2 ? p * (1 + static_cast<int>(sample.below(static_cast<uint64_t>(8 / p), at++)))
                              : 1 + static_cast<int>(sample.below(8, at++));
      const Variant variant{.seeded = sample.below(2, at++) > 0, .recomputed = trial >= 2};
      const std::vector<Schedule> all = all_schedules(p, m, 3);
      launch({.ranks = p, .threads_per_rank = 1, .timeout_s = 60}, [&](Communicator& axis) {
        for (const Schedule& s : all) {
          check_rank(axis, insert_messages(s), variant);
          if (s.has(PassKind::B)) check_rank(axis, split_backward(insert_messages(s)), variant);
        }
      });
    }
}

TEST(PipelineRuntime, FreesActivationsAccordingToSchedule) {
  constexpr int kMicrobatches = 8;
  std::vector<int64_t> peaks;
  for (const Schedule& schedule : {gpipe(2, kMicrobatches), one_f_one_b(2, kMicrobatches)})
    launch({.ranks = 2, .threads_per_rank = 1, .timeout_s = 60}, [&](Communicator& axis) {
      Made made(2);
      TestStages stages(made.chain, {}, made.arena);
      PipelineRuntime pipe(insert_messages(schedule), axis, stages);
      pipe.step();
      made.arena->reset_peaks();
      const auto live = [&] { return made.arena->total().live; };
      const int64_t before = live(), live_before = made.arena->usage(Category::activations).live;
      pipe.step();
      EXPECT_EQ(live(), before);
      // Only activations are counted: the workspace of a matmul depends on the CPU.
      if (axis.rank() == 0) peaks.push_back(made.arena->usage(Category::activations).peak - live_before);
    });
  EXPECT_GT(peaks[0], 3 * peaks[1]);  // 8 in flight against 2
}

// Stages that only scale: their graphs save nothing.
struct Scaling : Stages {
  ArenaPtr arena = make_arena();
  Var first{normal("input", 0, arena), true};
  StageOutput forward(int stage, int, const Var& input) override {
    const Var y = scale(stage == 0 ? first : input, 2);
    return stage < 2 ? StageOutput{.value = y} : StageOutput{.value = y, .seed = normal("target", 0, arena)};
  }
  Tensor make_activation(int, int) override { return Tensor::empty({kTokens, kChannels}, DType::float32, arena); }
  void accumulate(int, int, const std::function<void()>& pass) override { pass(); }
};

TEST(PipelineRuntime, RetainsOnlyTensorsSavedByOps) {
  launch({.ranks = 3, .threads_per_rank = 1, .timeout_s = 60}, [&](Communicator& axis) {
    Scaling stages;
    PipelineRuntime pipe(insert_messages(gpipe(3, 8)), axis, stages);
    pipe.step();
    stages.arena->reset_peaks();
    const int64_t before = stages.arena->total().live, one = kTokens * kChannels * 4;
    pipe.step();
    // All eight micro-batches are in flight in the middle; only the input and the output of one exist at a time.
    EXPECT_LE(axis.rank() == 1 ? stages.arena->total().peak - before : 0, 3 * one);
    EXPECT_EQ(pipe.peak_in_flight(), 8);
  });
}

TEST(PipelineRuntime, TracesEveryAction) {
  const Schedule schedule = insert_messages(zb_v(2, 3));
  launch({.ranks = 2, .threads_per_rank = 1, .timeout_s = 60}, [&](Communicator& axis) {
    Made made(4);
    TestStages stages(made.chain, {}, made.arena);
    Trace trace;
    PipelineRuntime(schedule, axis, stages, &trace).step();
    const std::vector<TraceEvent> events = trace.events();
    const auto& list = schedule.actions[static_cast<size_t>(axis.rank())];
    ASSERT_EQ(events.size(), list.size());
    for (size_t i = 0; i < list.size(); ++i) {
      EXPECT_EQ(events[i].what, list[i].str());
      EXPECT_LE(events[i].begin, events[i].end);
      EXPECT_LE(i > 0 ? events[i - 1].end : 0, events[i].begin);
    }
  });
}

TEST(PipelineRuntime, RejectsInvalidSchedules) {
  launch({.ranks = 2, .timeout_s = 60}, [&](Communicator& axis) {
    Made made(2);
    TestStages stages(made.chain, {}, made.arena);
    const auto make_runtime = [&](const Schedule& s) { PipelineRuntime(s, axis, stages); };
    EXPECT_THROW(make_runtime(gpipe(2, 2)), Error);                   // no messages
    EXPECT_THROW(make_runtime(insert_messages(gpipe(3, 2))), Error);  // not for two ranks
    Schedule broken = insert_messages(gpipe(2, 2));
    broken.actions[1].pop_back();
    EXPECT_THROW(make_runtime(broken), Error);
    EXPECT_NO_THROW(make_runtime(insert_messages(gpipe(2, 2))));
  });
}

}  // namespace
}  // namespace tessera
