// Invariants of predictions, closed forms of papers, and rejected cases.
#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <initializer_list>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "planner/case_json.h"
#include "planner/memory.h"
#include "planner/work.h"
#include "tests/support/draw.h"
#include "tests/support/errors.h"
#include "train/check.h"

namespace tessera::planner {
namespace {

Case make_case(const char* model, const char* hardware, const char* software) {
  return {.model = ModelShape(preset(model).value()),
          .hardware = hardware_named(hardware),
          .software = software_named(software)};
}

// Eight GPUs of an older kind per node: 125 TFLOP/s, 32 GB, flash-1 attention, and four 100 Gb/s adapters.
Hardware older_gpu() {
  return hardware_from_file(
      "peak_flops = 125e12\nhbm_bytes_per_s = 900e9\nmemory_bytes = 34.1e9\nmultiprocessors = 80\n"
      "ranks_per_node = 8\nintra_bytes_per_s = 150e9\ninter_bytes_per_s = 6.25e9\nintra_latency_s = 5e-6\n"
      "inter_latency_s = 1e-5\nlaunch_s = 3e-6\nattention_flash1_flops = 50e12\n"
      "attention_flash1_half_tokens = 350\nreserved_bytes = 1e9\nrange_fastest = 0.9\nrange_slowest = 1.2\n",
      "older.toml");
}

Hardware random_hardware(size_t i) {
  return i < hardware_names().size() ? hardware_named(hardware_names()[i]) : older_gpu();
}

Case random_case(uint64_t trial) {
  const Philox random = Philox::named(7, "predictions");
  uint64_t at = 100 * trial;
  const auto of = [&](std::initializer_list<int64_t> choices) {
    return *(choices.begin() + static_cast<int64_t>(random.below(choices.size(), at++)));
  };
  Case c{.hardware = random_hardware(random.below(hardware_names().size() + 1, at++)),
         .software = software_named(std::vector{"megatron", "deepspeed", "fsdp"}[random.below(3, at++)])};
  if (!c.hardware.attention.contains(c.software.attention)) c.software.attention = "unfused";
  const bool gated = of({0, 1}) == 1;
  ModelShape& m = c.model;
  m.layers = of({16, 32, 48}), m.channels = of({2048, 4096, 8192}), m.heads = 32, m.kv_heads = of({8, 32});
  m.experts.count = of({0, 0, 8}), m.experts.per_token = 2;
  m.gated = gated, m.encoding = gated ? Positions::rope : Positions::learned;
  m.vocab = of({32000, 128256}), m.context = of({1024, 4096}), m.tied = of({0, 1}) == 1;
  Plan& p = c.layout.plan;
  p.dp = of({1, 8, 64}), p.tp = of({1, 2, 8}), p.pp = of({1, 4, 8}), p.cp = of({1, 2});
  p.sp = p.tp > 1 && of({0, 1}) == 1;
  p.zero = static_cast<ZeroStage>(of({0, 1, 2, 3}));
  p.schedule = static_cast<ScheduleKind>(of({1, 2, 3, 4, 5, 6}));
  p.microbatches = p.pp * of({2, 4, 8});
  p.recompute = static_cast<Recompute>(of({0, 1, 2, 3, 4, 5}));
  if (c.model.experts.count > 0 && p.recompute == Recompute::op) p.recompute = Recompute::none;
  c.layout.sequences = of({1, 2, 4});
  if (c.model.experts.count > 0 && p.dp >= 8) c.layout.ep = of({1, 8});
  return c;
}

TEST(Predict, PartsSumToStepTimeAndValuesAreFinite) {
  for (uint64_t trial = 0; trial < 300; ++trial) {
    const Prediction p = predict(random_case(trial));
    const Parts& x = p.parts;
    EXPECT_NEAR(p.parts.sum(), p.step_s, 1e-12 * p.step_s);
    for (const double part : {x.compute, x.recompute, x.bubble, x.tp, x.cp, x.ep, x.dp, x.optimizer})
      EXPECT_TRUE(part >= 0 && std::isfinite(part)) << trial;
    EXPECT_TRUE(p.step_s > 0 && p.mfu > 0 && p.mfu < 1 && p.hfu >= p.mfu && p.hfu < 1) << trial << " " << p.hfu;
    EXPECT_TRUE(p.bubble >= 0 && p.bubble < 1) << trial;
    for (const MemoryParts& m : p.memory) EXPECT_TRUE(m.peak() > 0 && std::isfinite(m.peak())) << trial;
    for (const auto& [axis, operations] : p.bytes)
      for (const auto& [operation, bytes] : operations) EXPECT_TRUE(bytes >= 0 && std::isfinite(bytes)) << axis;
  }
}

TEST(Predict, IsMonotonicInHardwareAndBatch) {
  for (uint64_t trial = 0; trial < 100; ++trial) {
    const Case c = random_case(trial);
    const double step = predict(c).step_s;
    for (double Hardware::*rate : {&Hardware::peak_flops, &Hardware::hbm_bytes_per_s, &Hardware::intra_bytes_per_s,
                                   &Hardware::inter_bytes_per_s}) {
      Case better = c;
      better.hardware.*rate *= 1.5;
      EXPECT_LE(predict(better).step_s, step * (1 + 1e-9)) << trial;
    }
    Case twice = c;
    twice.layout.plan.microbatches *= 2;
    EXPECT_LE(predict(twice).step_s, 2 * step * (1 + 1e-9)) << trial;
    EXPECT_GE(predict(twice).step_s, step) << trial;
  }
}

TEST(Predict, PlanFitsExactlyUpToCapacity) {
  Case c = make_case("llama2-7b", "h100", "megatron");
  c.layout = {.plan = {.tp = 8}};
  c.hardware.reserved_bytes = 0;
  const Prediction p = predict(c);
  for (const double over : {-1, 0, 1}) {
    c.hardware.memory_bytes = p.memory[p.peak_rank].peak() - over;
    EXPECT_EQ(predict(c).fits, over <= 0) << over;
    EXPECT_NEAR(predict(c).over_bytes, std::max(0.0, over), 1e-4) << over;
  }
}

// 6 FLOPs per parameter (6,738,415,616 without the 32,000 x 4,096 embedding table and the final norm), and 12 x 32
// layers x 4,096 channels x 4,096 keys.
TEST(Predict, ThroughputEqualsWorkOverTime) {
  constexpr double kFlops = 6.0 * (6738415616 - 131072000 - 4096) + 12.0 * 32 * 4096 * 4096, kTokens = 16 * 4096;
  Case c = make_case("llama2-7b", "h100", "megatron");
  c.layout = {.plan = {.dp = 2, .tp = 4, .microbatches = 4}, .sequences = 2};
  c.hardware.peak_flops = 1e15, c.hardware.range_fastest = 0.75, c.hardware.range_slowest = 1.5;
  const Prediction p = predict(c);
  EXPECT_DOUBLE_EQ(p.tokens_per_s, kTokens / p.step_s);
  EXPECT_DOUBLE_EQ(p.tflops_per_rank, kFlops * kTokens / 8 / p.step_s / 1e12);
  EXPECT_DOUBLE_EQ(p.mfu, p.tflops_per_rank / 1000);
  EXPECT_DOUBLE_EQ(p.hfu, p.mfu);  // nothing is recomputed
  EXPECT_EQ(std::pair(p.fastest_s, p.slowest_s), std::pair(0.75 * p.step_s, 1.5 * p.step_s));
}

TEST(Predict, ClosedFormsApproximateSimulation) {
  for (uint64_t trial = 0; trial < 100; ++trial) {
    const Case c = random_case(trial);
    const auto layers = layers_of_stages(c, std::ssize(rank_of_stages(c.layout.plan)));
    const Prediction near = by_description(c, layers, nullptr), full = predict(c);
    EXPECT_NEAR(near.step_s / full.step_s, 1, 0.35) << trial;
    EXPECT_EQ(near.parts.compute, full.parts.compute);
  }
}

// Reports simulate the pipeline from these times: the makespan is the step without update and data axis.
TEST(Predict, SimulatedStagesMatchPredictedTime) {
  for (const bool overlap : {false, true}) {
    Case c = make_case("llama2-7b", "a100-80", "megatron");
    c.layout.plan = {.pp = 4, .microbatches = 8};
    c.software.pp_overlap = overlap;
    const Prediction p = predict(c);
    const Simulation simulation = simulate(make_schedule(c.layout.plan), {.stages = p.stages, .message = p.message_s});
    EXPECT_NEAR(simulation.makespan, p.step_s - p.parts.optimizer - p.parts.dp, 1e-9 * p.step_s) << overlap;
  }
}

std::string refusal(const std::string& model, const std::string& plan, const std::string& rest = "",
                    Status status = Status::usage) {
  const std::string text = R"({"model":{"layers":4,"channels":64,"heads":4,"vocab":100,"context":64)" + model +
                           R"(},"plan":{)" + plan + R"(},"hardware":)" + (rest.empty() ? R"("h100")" : rest) + "}";
  return error_message([&] { predict(case_from_json(text, "cases")); }, status);
}

TEST(Predict, RejectsInvalidCases) {
  EXPECT_EQ(refusal("", R"("dp":2)"), "nothing was thrown");
  EXPECT_TRUE(has(refusal(R"(,"width":3)", ""), "model.width"));
  EXPECT_TRUE(has(refusal("", R"("tensor":2)"), "plan.tensor"));
  EXPECT_TRUE(has(refusal("", R"("tp":3)"), "tp"));
  EXPECT_TRUE(has(refusal("", R"("tp":-2)"), "plan.tp"));
  EXPECT_TRUE(has(refusal("", R"("dp":0)"), "dp"));
  EXPECT_TRUE(has(refusal("", R"("pp":8,"microbatches":8)"), "pp"));
  EXPECT_TRUE(has(refusal("", R"("microbatches":4611686018427387904)"), "microbatches"));
  EXPECT_TRUE(has(refusal("", R"("dp":1000000)"), "ranks"));
  EXPECT_NE(refusal("", R"("pp":4,"schedule":"interleaved","chunks":1,"microbatches":6)"), "nothing was thrown");
  EXPECT_TRUE(has(refusal("", R"("dp":2,"ep":2)"), "ep"));
  EXPECT_TRUE(has(refusal(R"(,"kv_heads":3)", ""), "kv_heads"));
  const std::string fsdp = R"("h100","software":{"base":"fsdp")";
  EXPECT_EQ(refusal("", R"("recompute":"op")", fsdp + "}"), "nothing was thrown");
  EXPECT_TRUE(has(refusal("", R"("recompute":"op")"), "recompute"));
  EXPECT_TRUE(has(refusal(R"(,"experts":4,"experts_per_token":2)", R"("recompute":"op")", fsdp + "}"), "experts"));
  EXPECT_TRUE(has(refusal("", "", fsdp + R"(,"reshard_after_forward":true})"), "reshard_after_forward"));
  EXPECT_NO_THROW(check(Plan{}));
  EXPECT_THROW(check(Plan{.recompute = Recompute::op}), FieldError);  // not supported by Tessera
  EXPECT_TRUE(has(refusal("", "", R"("h1000")"), "a100-80"));
  EXPECT_TRUE(has(refusal("", "", R"({"base":"h100","hbm_bytes_per_s":0})"), "hbm_bytes_per_s"));
  EXPECT_TRUE(has(refusal("", "", R"({"base":"h100","peak_flops":-1})"), "peak_flops"));
  EXPECT_TRUE(has(refusal("", "", R"({"base":"h100","speed":1})"), "speed"));
  EXPECT_TRUE(has(refusal("", "", R"({"base":"h100","memory_bytes":1e999})", Status::input), "not valid JSON"));
  EXPECT_TRUE(has(refusal("", "", R"({"base":"h100","peak_flops":1e-300,"hbm_bytes_per_s":1e-300})"), "hardware"));
  EXPECT_TRUE(has(refusal("", "", R"({"base":"h100","contention":2})"), "contention"));
  EXPECT_EQ(refusal("", "", R"({"base":"h100","intra_latency_s":0,"attention":{"flash2":1e14}})"),
            "nothing was thrown");
  EXPECT_TRUE(has(refusal("", "", R"({"peak_flops":1e12})"), "hbm_bytes_per_s"));
}

// Bubbles, activations and model states compared with formulas of papers.

constexpr double kPoint = 0.01;

double bubble(ScheduleKind kind, int64_t p, int64_t m, bool spans = true) {
  const Plan plan{.pp = p, .schedule = kind, .microbatches = m};
  const std::vector<StageTimes> equal(rank_of_stages(plan).size(),
                                      {.forward = 1, .backward = 2, .input = 1, .weight = 1});
  return PipelineClock().time(plan, equal, 0, spans).bubble;
}

// Huang et al. 2019; Qi et al. 2024, table 2.
TEST(ClosedForms, BubblesMatchPapers) {
  for (const int64_t p : {2, 4, 8, 64})
    for (const int64_t m : {2 * p, 5 * p + 1, int64_t{3000}}) {
      const auto ranks = static_cast<double>(p), batches = static_cast<double>(m);
      EXPECT_NEAR(bubble(ScheduleKind::one_f_one_b, p, m), (ranks - 1) / (batches + ranks - 1), 0.005 * kPoint);
      EXPECT_NEAR(bubble(ScheduleKind::gpipe, p, m), (ranks - 1) / (batches + ranks - 1), 0.005 * kPoint);
      EXPECT_NEAR(bubble(ScheduleKind::zb_h2, p, m), 0, 0.005 * kPoint);
      EXPECT_NEAR(bubble(ScheduleKind::zb_h1, p, m, false), (ranks - 1) / (3 * batches + ranks - 1), 0.005 * kPoint);
    }
}

// Independent of previous calls (cached schedules).
TEST(ClosedForms, PipelineClockMatchesSimulation) {
  PipelineClock clock;
  for (uint64_t trial = 0; trial < test::plans(100); ++trial) {
    test::Sampler sample("clock", trial);
    Plan plan{.pp = sample.between(1, 5), .schedule = static_cast<ScheduleKind>(sample.between(0, 8))};
    plan.microbatches = plan.pp * sample.between(1, 4);
    if (plan.schedule == ScheduleKind::interleaved) plan.chunks = sample.between(2, 3);
    std::vector<StageTimes> stages(rank_of_stages(plan).size());
    const auto some = [&] { return static_cast<double>(sample.between(0, 90)) / 100; };
    for (StageTimes& s : stages) s = {some(), some(), some(), some()};
    const double message = some();
    const Simulation full = simulate(make_schedule(plan), {.stages = stages, .message = message});
    const PipelineTime found = clock.time(plan, stages, message, false);
    EXPECT_EQ(found.seconds, full.makespan) << value_name(plan.schedule) << ' ' << plan.pp;
    EXPECT_EQ(found.in_flight, full.in_flight) << value_name(plan.schedule) << ' ' << plan.pp;
    double longest = 0;
    for (const auto& list : full.actions) longest = std::max(longest, list.back().end - list.front().start);
    EXPECT_EQ(clock.time(plan, stages, message, true).seconds, longest) << value_name(plan.schedule) << ' ' << plan.pp;
  }
}

// The clock simulates only the first rounds of a long pipeline and extrapolates.
TEST(ClosedForms, ExtrapolationMatchesFullSimulation) {
  for (uint64_t trial = 0; trial < test::plans(60); ++trial) {
    test::Sampler sample("long pipelines", trial);
    const int64_t p = sample.between(2, 8);
    Plan plan{.pp = p};
    plan.schedule =
        sample.of({ScheduleKind::gpipe, ScheduleKind::one_f_one_b, ScheduleKind::interleaved, ScheduleKind::zb_h1,
                   ScheduleKind::zb_h2, ScheduleKind::zb_v, ScheduleKind::v_half, ScheduleKind::v_min});
    plan.microbatches = p * sample.between(20, 60);
    if (plan.schedule != ScheduleKind::interleaved) plan.microbatches += sample.between(0, p - 1);
    std::vector<StageTimes> stages(rank_of_stages(plan).size());
    const auto about = [&](double x) { return x * static_cast<double>(sample.between(90, 110)) / 100; };
    for (StageTimes& s : stages) s = {about(1), about(2), about(1), about(1)};
    const double message = static_cast<double>(sample.between(0, 3)) / 20;
    const Simulation full = simulate(schedule_with(plan, plan.microbatches), {.stages = stages, .message = message});
    const PipelineTime found = PipelineClock().time(plan, stages, message, false);
    EXPECT_NEAR(found.seconds, full.makespan, 0.01 * full.makespan) << value_name(plan.schedule) << ' ' << p;
    EXPECT_EQ(found.in_flight, full.in_flight) << value_name(plan.schedule) << ' ' << p;
  }
}

// GPT-3 with tensor parallelism.
Case korthikanti(int64_t t, bool sp, Recompute recompute) {
  Case c{.model = ModelShape({.layers = 96, .heads = 96, .channels = 12288, .context = 2048, .vocab = 51200}),
         .layout = {.plan = {.tp = t, .sp = sp, .recompute = recompute}, .sequences = 2},
         .hardware = hardware_named("a100-80"),
         .software = software_named("megatron")};
  c.software.attention = "unfused";
  return c;
}

// Korthikanti et al. 2022, equations 1 to 6 and table 2.
TEST(ClosedForms, LayerActivationsMatchPaper) {
  const double s = 2048, b = 2, h = 12288, a = 96, t = 8, sbh = s * b * h, pairs = 5 * a * s / h;
  EXPECT_EQ(saved_by_layer(korthikanti(1, false, Recompute::none)), sbh * (34 + pairs));
  EXPECT_EQ(saved_by_layer(korthikanti(8, false, Recompute::none)), sbh * (10 + 24 / t + pairs / t));
  EXPECT_EQ(saved_by_layer(korthikanti(8, true, Recompute::none)), sbh / t * (34 + pairs));
  EXPECT_EQ(saved_by_layer(korthikanti(8, false, Recompute::attention)), sbh * (10 + 24 / t));
  EXPECT_EQ(saved_by_layer(korthikanti(8, true, Recompute::attention)), sbh * 34 / t);
  EXPECT_EQ(saved_by_layer(korthikanti(8, false, Recompute::block)), sbh * 2);
}

// The first stage holds the activations of all layers for one micro-batch, independent of p, and a fraction (p - 1) /
// (p m) more with interleaving (section 4.2.3). A single stage adds the embedding mask, the inputs of norm and head,
// and logits.
TEST(ClosedForms, ModelActivationsMatchPaper) {
  const double s = 2048, b = 2, h = 12288, v = 51200, sbh = s * b * h, layer = sbh * 34 / 8;
  Case c = korthikanti(8, true, Recompute::attention);
  const double ends = sbh / 8 * (1 + 2 + 2) + 4 * s * b * v / 8;
  EXPECT_EQ(predict(c).memory.at(0).activations, 96 * layer + ends);
  c.layout.plan.pp = 8;
  c.layout.plan.microbatches = 64;
  const double mask = sbh / 8;
  EXPECT_EQ(predict(c).memory.at(0).activations, 96 * layer + 8 * mask);
  c.layout.plan.schedule = ScheduleKind::interleaved;
  c.layout.plan.chunks = 3;
  EXPECT_NEAR(predict(c).memory.at(0).activations, 96 * layer * (1 + 7.0 / 24) + 8 * (1 + 7.0 / 24) * mask, 1);
}

// Rajbhandari et al. 2020, figure 1 and table 1: 7.5e9 parameters in mixed precision, in GB.
TEST(ClosedForms, ZeroModelStatesMatchPaper) {
  Case c{.model = ModelShape({.layers = 36, .heads = 32, .channels = 4096, .context = 2048, .vocab = 51200}),
         .hardware = hardware_named("a100-40"),
         .software = software_named("deepspeed")};
  c.software.attention = "unfused";
  const double psi = parameters(c.model), scale = 7.5 / psi;
  const double table[3][4] = {{120, 120, 120, 120}, {120, 31.4, 16.6, 1.88}, {120, 30.1, 15.1, 0.12}};
  const int64_t ranks[] = {1, 64, 1024};
  for (int i = 0; i < 3; ++i)
    for (int zero = 0; zero <= 3; ++zero) {
      c.layout.plan.dp = ranks[i];
      c.layout.plan.zero = static_cast<ZeroStage>(zero);
      const MemoryParts m = predict(c).memory.at(0);
      const double states = m.parameters + m.gradients + m.optimizer, n = static_cast<double>(ranks[i]);
      EXPECT_NEAR(states * scale, table[i][zero], 0.06) << n << " ranks, stage " << zero;
      const double exact[] = {16, 4 + 12 / n, 2 + 14 / n, 16 / n};
      EXPECT_DOUBLE_EQ(states, exact[zero] * psi);
    }
}

// A pipeline stores a tied table on both ends, as if untied; a single rank stores it once.
TEST(ClosedForms, TiedTableIsStoredOnBothPipelineEnds) {
  const double h = 12288, table = 51200 * h, layers = 48 * (12 * h * h + 13 * h), positions = 2048 * h;
  for (const bool tied : {true, false}) {
    Case c = korthikanti(1, false, Recompute::none);
    c.model.tied = tied;
    const MemoryParts one = predict(c).memory.at(0);
    EXPECT_EQ(one.parameters, 2 * (2 * layers + positions + 2 * h + (tied ? 1 : 2) * table)) << tied;
    c.layout.plan.pp = c.layout.plan.microbatches = 2;
    const double held[] = {layers + table + positions, layers + 2 * h + table};
    for (const size_t rank : {0, 1}) {
      const MemoryParts m = predict(c).memory.at(rank);
      EXPECT_EQ(m.parameters + m.gradients + m.optimizer, (2 + 4 + 12) * held[rank]) << tied << rank;
    }
  }
}

// Bytes of an update: gradients are read for the norm and the update, moments and master copy are read and written.
// ZeRO shards them over dp x cp.
TEST(ClosedForms, UpdateIsShardedOverDataAndContextRanks) {
  Case c = make_case("llama3-8b", "h100", "megatron");
  const double all = parameters(c.model) * (2 * 12 + 3 * 4 + 2) / (0.85 * c.hardware.hbm_bytes_per_s);
  for (const auto& [dp, cp] : {std::pair<int64_t, int64_t>{8, 1}, {2, 4}, {1, 8}})
    for (const ZeroStage zero : {ZeroStage::none, ZeroStage::one, ZeroStage::two, ZeroStage::three}) {
      c.layout.plan = {.dp = dp, .cp = cp, .zero = zero};
      const double expected = zero == ZeroStage::none ? all : all / 8;
      EXPECT_NEAR(predict(c).parts.optimizer, expected, 1e-9 * expected) << to_text(c.layout.plan);
    }
}

// Links are so slow that communication takes longer than both passes: reductions overlap the backward pass, the
// all-gather of ZeRO-1 the next forward pass.
TEST(ClosedForms, ReductionsOverlapBackward) {
  Case c = make_case("llama2-7b", "h100", "megatron");
  c.hardware.intra_bytes_per_s = c.hardware.inter_bytes_per_s = 1e8;
  for (const ZeroStage zero : {ZeroStage::none, ZeroStage::one}) {
    c.layout.plan = {.dp = 4, .zero = zero};
    c.software.dp_overlap = false;
    const double sent = predict(c).parts.dp;
    c.software.dp_overlap = true;
    const Prediction p = predict(c);
    const StageTimes& pass = p.stages.at(0);
    ASSERT_GT(pass.backward, 1.5 * pass.forward);
    ASSERT_GT(sent, 5 * (pass.forward + pass.backward));
    const double overlapped = pass.backward + (zero == ZeroStage::one ? pass.forward : 0);
    EXPECT_NEAR(sent - p.parts.dp, (1 - c.hardware.contention) * overlapped, 1e-6 * overlapped)
        << to_text(c.layout.plan);
  }
}

// torchtitan's policy saves the outputs of every second matmul of q, k, v, o, gate, up and down. Llama 3 8B with 8,192
// tokens: 1,024 channels for k and v, 14,336 for gate.
TEST(ClosedForms, OpRecomputationSavesEverySecondGemm) {
  Case c = make_case("llama3-8b", "h100", "fsdp");
  c.layout.plan.recompute = Recompute::op;
  const double s = 8192, h = 4096;
  EXPECT_EQ(saved_by_layer(c), 2 * s * (h + h + 1024 + h + 14336 + h) + 4 * 32 * s);
  double recomputed = 0;
  for (const Task& task : step_work(c, Caller::described).layer.recompute.tasks) recomputed += task.flops;
  EXPECT_EQ(recomputed, 2 * s * h * (1024 + 4096 + 14336));
  c.layout.plan.recompute = Recompute::none;
  const double all = predict(c).parts.compute;
  for (const auto& [recompute, part] : {std::pair{Recompute::op, 0.12}, {Recompute::block, 0.33}}) {
    c.layout.plan.recompute = recompute;
    const Parts parts = predict(c).parts;
    EXPECT_EQ(parts.compute, all);
    EXPECT_NEAR(parts.recompute / all / part, 1, 0.4) << part;
  }
  // The saved output of the last matmul precedes the reduce-scatter and is therefore unsharded.
  c.layout.plan = {.tp = 8, .sp = true, .recompute = Recompute::op};
  EXPECT_EQ(saved_by_layer(c), 2 * s * (3 * h / 8 + 2 * h / 8 + 128 + 14336.0 / 8 + h) + 4 * 4 * s);
}

// PyTorch pipelines keep parameters and gradients unsharded between micro-batches, and have separate receive buffers
// for each micro-batch.
TEST(ClosedForms, FsdpPipelineStagesStayUnsharded) {
  Case c = make_case("llama3-8b", "h100", "fsdp");
  Plan& p = c.layout.plan;
  p = {.pp = 4, .dp = 2, .zero = ZeroStage::three, .microbatches = 8, .recompute = Recompute::block};
  const double message = 2 * 8192.0 * 4096, layer = stage_parameters(c, 1, false, false).all();
  for (const auto& [rank, messages] :
       {std::pair{size_t{0}, 8 + 4}, {1, 8 + 8}, {3, 8 - 1}}) {  // in flight: 4 (first), 1 (last)
    const double held = stage_parameters(c, 8, rank == 0, rank == 3).all();
    const MemoryParts m = predict(c).memory.at(rank);
    EXPECT_EQ(m.gradients, 4 * held) << rank;
    EXPECT_EQ(m.parameters + m.optimizer, 12 * held / 2) << rank;
    EXPECT_EQ(m.communication, 2 * held + 4 * layer + messages * message) << rank;
  }
  const auto sent = [&] { return predict(c).bytes.at("dp"); };
  const auto once = sent();
  p.microbatches = 16;
  EXPECT_EQ(sent(), once);
  c.software.reshard_after_forward = Reshard::always;
  EXPECT_EQ(sent().at("all_gather"), 2 * 16 * once.at("all_gather"));
  EXPECT_EQ(sent().at("reduce_scatter"), once.at("reduce_scatter"));
  c.software.sums_after_pipeline = false;
  EXPECT_EQ(sent().at("reduce_scatter"), 16 * once.at("reduce_scatter"));
  EXPECT_LT(predict(c).memory.at(1).gradients, 3 * stage_parameters(c, 8, false, false).all());
}

// Exact published parameter counts.
TEST(ClosedForms, ParameterCountsMatchPublishedModels) {
  const std::pair<const char*, double> published[] = {
      {"llama2-7b", 6738415616},     {"llama2-13b", 13015864320},  {"llama2-70b", 68976648192},
      {"llama3-8b", 8030261248},     {"llama3-70b", 70553706496},  {"llama3-405b", 405853388800},
      {"qwen2.5-0.5b", 494032768},   {"qwen2.5-1.5b", 1543714304}, {"qwen2.5-3b", 3085938688},
      {"qwen2.5-7b", 7615616512},    {"mistral-7b", 7241732096},   {"mixtral-8x7b", 46702792704},
      {"qwen3-30b-a3b", 30532122624}};
  for (const auto& [name, expected] : published)
    EXPECT_EQ(parameters(ModelShape(preset(name).value())), expected) << name;
  for (const auto& [name, expected] : {std::pair{"gpt2", 124439808.0},
                                       {"gpt2-medium", 354823168},
                                       {"gpt2-large", 774030080},
                                       {"gpt2-xl", 1557611200}}) {
    ModelConfig config = preset(name).value();
    config.vocab = 50257;
    EXPECT_EQ(parameters(ModelShape(config)), expected) << name;
    config.positions = std::exchange(config.context, 256);  // the position table is not truncated
    EXPECT_EQ(parameters(ModelShape(config)), expected) << name;
    EXPECT_EQ(parameters(ModelShape(ModelShape(config).config())), expected) << name;
  }
}

}  // namespace
}  // namespace tessera::planner
