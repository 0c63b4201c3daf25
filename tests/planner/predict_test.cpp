// Rules that every prediction must keep, and questions that are refused.

#include <gtest/gtest.h>

#include "planner/case_json.h"
#include "planner/memory.h"
#include "planner/pipeline.h"

namespace tessera::planner {
namespace {

Case drawn(uint64_t trial) {
  const Philox random = Philox::named(7, "predictions");
  uint64_t at = 100 * trial;
  const auto of = [&](std::initializer_list<int64_t> choices) {
    return *(choices.begin() + static_cast<int64_t>(random.below(choices.size(), at++)));
  };
  Case c{.hardware = hardware_named(hardware_names()[random.below(hardware_names().size(), at++)]),
         .software = software_named(std::vector{"megatron", "deepspeed", "fsdp"}[random.below(3, at++)])};
  if (!c.hardware.attention.contains(c.software.attention)) c.software.attention = "unfused";
  const bool gated = of({0, 1}) == 1;
  c.model = {.layers = of({16, 32, 48}),
             .channels = of({2048, 4096, 8192}),
             .heads = 32,
             .kv_heads = of({8, 32}),
             .experts = of({0, 0, 8}),
             .experts_per_token = 2,
             .gated = gated,
             .vocab = of({32000, 128256}),
             .context = of({1024, 4096}),
             .tied = of({0, 1}) == 1,
             .positions = gated ? Positions::rope : Positions::learned};
  Plan& p = c.layout.plan;
  p.dp = of({1, 8, 64}), p.tp = of({1, 2, 8}), p.pp = of({1, 4, 8}), p.cp = of({1, 2});
  p.sp = p.tp > 1 && of({0, 1}) == 1;
  p.zero = static_cast<ZeroStage>(of({0, 1, 2, 3}));
  p.schedule = static_cast<ScheduleKind>(of({1, 2, 3, 4, 5, 6}));
  p.microbatches = p.pp * of({2, 4, 8});
  p.recompute = static_cast<Recompute>(of({0, 1, 2, 3, 4}));
  c.layout.sequences = of({1, 2, 4});
  if (c.model.experts > 0 && p.dp >= 8) c.layout.ep = of({1, 8});
  return c;
}

TEST(Predict, PartsAddUpAndNumbersAreNumbers) {
  for (uint64_t trial = 0; trial < 300; ++trial) {
    const Prediction p = predict(drawn(trial));
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

TEST(Predict, BetterHardwareIsNeverSlowerAndTwiceTheBatchNeverMoreThanTwice) {
  for (uint64_t trial = 0; trial < 100; ++trial) {
    const Case c = drawn(trial);
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

// By closed forms what the simulation says, but for uneven ends and messages.
TEST(Predict, EstimatesAreNear) {
  for (uint64_t trial = 0; trial < 100; ++trial) {
    const Case c = drawn(trial);
    const auto layers = layers_of_stages(c, std::ssize(rank_of_stages(c.layout.plan)));
    const Prediction near = by_description(c, layers, false), whole = predict(c);
    EXPECT_NEAR(near.step_s / whole.step_s, 1, 0.35) << trial;
    EXPECT_EQ(near.parts.compute, whole.parts.compute);
  }
}

// Pages draw the pipeline again from these times: it takes the step, but for the update.
TEST(Predict, WhatIsDrawnTakesWhatWasPredicted) {
  for (const bool overlap : {false, true}) {
    Case c;
    c.model = shape_of(preset("llama2-7b").value());
    c.hardware = hardware_named("a100-80");
    c.software = software_named("megatron");
    c.layout.plan.pp = 4;
    c.layout.plan.microbatches = 8;
    c.software.pp_overlap = overlap;
    const Prediction p = predict(c);
    const Simulation drawn = simulate(schedule_of(c.layout.plan), {.stages = p.stages, .message = p.message_s});
    EXPECT_NEAR(drawn.makespan, p.step_s - p.parts.optimizer - p.parts.dp, 1e-9 * p.step_s) << overlap;
  }
}

std::string refusal(const std::string& model, const std::string& plan, const std::string& rest = "") {
  const std::string text = R"({"model":{"layers":4,"channels":64,"heads":4,"vocab":100,"context":64)" + model +
                           R"(},"plan":{)" + plan + R"(},"hardware":)" + (rest.empty() ? R"("h100")" : rest) + "}";
  try {
    predict(case_from_json(text, "cases"));
  } catch (const Error& e) {
    return e.what();
  }
  return "";
}

TEST(Predict, RefusesWhatCannotBe) {
  EXPECT_EQ(refusal("", R"("dp":2)"), "");
  EXPECT_NE(refusal(R"(,"width":3)", "").find("model.width"), std::string::npos);
  EXPECT_NE(refusal("", R"("tensor":2)").find("plan.tensor"), std::string::npos);
  EXPECT_NE(refusal("", R"("tp":3)").find("tp"), std::string::npos);
  EXPECT_NE(refusal("", R"("tp":-2)").find("plan.tp"), std::string::npos);
  EXPECT_NE(refusal("", R"("dp":0)").find("dp"), std::string::npos);
  EXPECT_NE(refusal("", R"("pp":8,"microbatches":8)").find("pp"), std::string::npos);
  EXPECT_NE(refusal("", R"("microbatches":4611686018427387904)").find("microbatches"), std::string::npos);
  EXPECT_NE(refusal("", R"("dp":1000000)").find("ranks"), std::string::npos);
  EXPECT_NE(refusal("", R"("pp":4,"schedule":"interleaved","chunks":1,"microbatches":6)"), "");
  EXPECT_NE(refusal("", R"("dp":2,"ep":2)").find("ep"), std::string::npos);
  EXPECT_NE(refusal(R"(,"kv_heads":3)", "").find("kv_heads"), std::string::npos);
  EXPECT_NE(refusal("", "", R"("h1000")").find("a100-80"), std::string::npos);
  EXPECT_NE(refusal("", "", R"({"base":"h100","hbm_bytes_per_s":0})").find("hbm_bytes_per_s"), std::string::npos);
  EXPECT_NE(refusal("", "", R"({"base":"h100","peak_flops":-1})").find("peak_flops"), std::string::npos);
  EXPECT_NE(refusal("", "", R"({"base":"h100","speed":1})").find("speed"), std::string::npos);
  EXPECT_NE(refusal("", "", R"({"base":"h100","memory_bytes":1e999})"), "");
  EXPECT_NE(refusal("", "", R"({"base":"h100","peak_flops":1e-300,"hbm_bytes_per_s":1e-300})").find("hardware"),
            std::string::npos);
  EXPECT_NE(refusal("", "", R"({"base":"h100","contention":2})").find("contention"), std::string::npos);
  EXPECT_EQ(refusal("", "", R"({"base":"h100","intra_latency_s":0,"attention":{"flash2":1e14}})"), "");
  EXPECT_NE(refusal("", "", R"({"peak_flops":1e12})").find("hbm_bytes_per_s"), std::string::npos);
}

}  // namespace
}  // namespace tessera::planner
