// Pipelines of every schedule train like one rank to the bit, alone and with data parallelism; tensor and context
// parallelism, and all products up to 16 ranks, to the bound of the contract.

#include "tests/verify/draw.h"

namespace tessera {
namespace {

using test::Draw;
using test::expect_passes;
using test::small_plan;

// Every random plan draws these alike.
TrainOptions draw_model(Draw& d) {
  TrainOptions o = small_plan();
  o["vocab"] = d.between(5, 70);
  o["dropout"] = d.of({0.0, 0.1, 0.3});
  o["optimizer"] = d.of<const char*>({"sgd", "adam", "adamw"});
  o["momentum"] = d.of({0.0, 0.9});
  o["clip"] = d.of({0.0, 0.5, 1.0});
  o["recompute"] = d.of<const char*>({"none", "none", "activation", "activation+norm", "attention", "block"});
  o["seed"] = d.between(0, 1 << 20);
  o["lr"] = text_of(o.optim.optimizer) == "sgd" ? 0.3 : 0.01;
  o["timeout"] = 60;
  return o;
}

void draw_pipeline(Draw& d, TrainOptions& o, int64_t ranks) {
  o["pp"] = ranks;
  const auto& names = schedule_names();
  o["schedule"] = names[static_cast<size_t>(d.between(0, static_cast<int64_t>(names.size()) - 1))];
  o["microbatches"] = d.between(1, 6);
  int64_t chunks = is_v(*value_named<ScheduleKind>(kScheduleNames, text_of(o.plan.schedule))) ? 2 : 1;
  if (text_of(o.plan.schedule) == "interleaved") {
    o["chunks"] = chunks = d.between(1, 3);
    o["microbatches"] = ranks * d.between(1, 2);
  }
  o["layers"] = ranks * chunks + d.between(0, 2);
}

// Pipelines with DDP or a stage of ZeRO.
TrainOptions draw_exact_plan(uint64_t trial) {
  Draw d("pipelines", trial);
  TrainOptions o = draw_model(d);
  o["heads"] = d.between(1, 3);
  o["channels"] = o.sizes.heads * 4 * d.between(1, 4);
  o["context"] = d.between(3, 14);
  draw_pipeline(d, o, d.between(1, 4));
  o["dp"] = d.of<int64_t>({1, 1, 2, 3});
  o["batch"] = o.plan.dp * o.plan.microbatches * d.between(1, 2);
  o["dtype"] = d.of<const char*>({"fp32", "fp32", "bf16", "fp64"});
  o["grad_dtype"] = text_of(o.optim.dtype) == "bf16" ? d.of<const char*>({"fp32", "bf16"}) : "fp32";
  o["zero"] = d.between(0, 3);
  o["all_reduce"] = d.of<const char*>({"direct", "direct", "ring", "tree", "root"});
  o["bucket_mb"] = d.of({1e-6, 0.001, 4.0});
  test::draw_family(d, o);
  test::draw_experts(d, o, o.plan.dp);
  if (text_of(o.optim.dtype) == "bf16") o["state_dtype"] = d.of<const char*>({"fp32", "bf16"});
  test::draw_replicas(d, o, o.plan.dp * o.plan.cp);
  return o;
}

TEST(MeshContract, PipelinesTrainLikeOneRankToTheBit) {
  for (uint64_t trial = 0; trial < test::plans(40); ++trial) {
    SCOPED_TRACE(trial);
    expect_passes(draw_exact_plan(trial));
  }
}

// Sizes of the axes, with at least one rank on a tensor or context axis and 16 at most in all.
void draw_mesh(Draw& d, TrainOptions& o) {
  do {
    o["tp"] = d.of<int64_t>({1, 2, 2, 3, 4});
    o["cp"] = d.of<int64_t>({1, 1, 2, 3});
    o["dp"] = d.of<int64_t>({1, 1, 2});
    o["pp"] = d.of<int64_t>({1, 1, 2, 3});
  } while (o.plan.tp * o.plan.cp == 1 || o.plan.tp * o.plan.cp * o.plan.dp * o.plan.pp > 16);
}

TrainOptions draw_split_plan(uint64_t trial) {
  Draw d("products", trial);
  TrainOptions o = draw_model(d);
  draw_mesh(d, o);
  if (o.plan.pp > 1)
    draw_pipeline(d, o, o.plan.pp);
  else
    o["layers"] = d.between(1, 3);
  o["cp_mode"] = d.of<const char*>({"ring", "ulysses"});
  o["sp"] = d.between(0, 1) == 1;
  const int64_t unit = o.plan.tp * (text_of(o.plan.cp_mode) == "ulysses" ? o.plan.cp : 1);
  o["heads"] = unit * d.between(1, 3);
  o["channels"] = o.sizes.heads * 4 * d.between(1, 3);
  o["context"] = 2 * o.plan.cp * o.plan.tp * d.between(1, 2);
  o["batch"] = o.plan.dp * o.plan.microbatches * d.between(1, 2);
  o["zero"] = d.between(0, 3);
  o["all_reduce"] = d.of<const char*>({"direct", "direct", "ring", "tree", "root"});
  o["dtype"] = d.of<const char*>({"fp64", "fp64", "fp64", "fp32", "bf16"});
  o["steps"] = 4;
  test::draw_family(d, o, unit);
  test::draw_experts(d, o, o.plan.dp * o.plan.cp);
  return o;
}

TEST(MeshContract, ProductsOfAllAxesTrainLikeOneRank) {
  for (uint64_t trial = 0; trial < test::plans(40); ++trial) {
    SCOPED_TRACE(trial);
    expect_passes(draw_split_plan(trial));
  }
}

// One plan of each kind, so that a failure has a name.
TEST(MeshContract, EachScheduleAlone) {
  for (const std::string& name : schedule_names()) {
    TrainOptions o = small_plan();
    o["schedule"] = name;
    say(o, "pp=2 layers=4 microbatches=4 batch=8");
    expect_passes(o);
  }
}

TEST(MeshContract, EachSplitAlone) {
  for (const bool sp : {false, true}) {
    TrainOptions o = small_plan();
    say(o, "dtype=fp64 tp=2");
    o["sp"] = sp;
    expect_passes(o);
  }
  for (const char* mode : {"ring", "ulysses"}) {
    TrainOptions o = small_plan();
    say(o, "dtype=fp64 cp=2");
    o["cp_mode"] = mode;
    expect_passes(o);
  }
}

TEST(MeshContract, TheLossFallsUnderAllFourAxes) {
  TrainOptions o = small_plan();
  o["pp"] = o["dp"] = o["cp"] = o["tp"] = 2;
  say(o, "sp=true zero=1 microbatches=2 batch=12 steps=40");
  const VerifyResult r = verify(job_of(o));
  EXPECT_TRUE(r.passed()) << r.failures.front();
  EXPECT_LT(r.losses.back(), r.losses.front() - 0.2);
}

}  // namespace
}  // namespace tessera
