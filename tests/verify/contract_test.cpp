// Every member of the data-parallel family trains like one rank: random models, batches, ranks, buckets, dtypes.

#include "tests/verify/draw.h"

namespace tessera {
namespace {

using test::Draw;
using test::expect_passes;
using test::small_plan;

TrainOptions draw_plan(uint64_t trial) {
  Draw d("plans", trial);
  TrainOptions o = small_plan();
  o["layers"] = d.between(1, 3);
  o["heads"] = d.between(1, 3);
  o["channels"] = o.sizes.heads * 4 * d.between(1, 5);
  o["context"] = d.between(3, 20);
  o["vocab"] = d.between(5, 90);
  o.ranks = d.of<int64_t>({2, 3, 4, 8});
  o["microbatches"] = d.between(1, 3);
  o["batch"] = *o.ranks * o.plan.microbatches * d.between(1, 3);
  o["dropout"] = d.of({0.0, 0.1, 0.3});
  o["dtype"] = d.of<const char*>({"fp32", "fp32", "bf16", "fp64"});
  o["grad_dtype"] = text_of(o.optim.dtype) == "bf16" ? d.of<const char*>({"fp32", "bf16"}) : "fp32";
  o["optimizer"] = d.of<const char*>({"sgd", "adam", "adamw"});
  o["momentum"] = d.of({0.0, 0.9});
  o["clip"] = d.of({0.0, 0.5, 1.0});
  o["recompute"] = d.of<const char*>({"none", "activation", "activation+norm", "attention", "block"});
  o["seed"] = d.between(0, 1 << 20);
  o["lr"] = text_of(o.optim.optimizer) == "sgd" ? 0.3 : 0.01;
  o["dp_mode"] = d.of<const char*>({"ddp", "ddp", "ddp", "ddp", "dataparallel", "ps-sync"});
  if (text_of(o.plan.dp_mode) == "ddp") {
    o["zero"] = d.between(0, 3);
    o["all_reduce"] = d.of<const char*>({"direct", "direct", "ring", "tree", "root"});
    o["bucket_mb"] = d.of({1e-6, 0.001, 0.01, 4.0});
  }
  o["offload"] = d.of<const char*>({"none", "none", "optimizer"});
  if (text_of(o.plan.dp_mode) == "ps-sync") o["servers"] = d.between(1, *o.ranks);
  test::draw_family(d, o);
  test::draw_experts(d, o, *o.ranks);
  if (text_of(o.optim.dtype) == "bf16") o["state_dtype"] = d.of<const char*>({"fp32", "bf16"});
  test::draw_replicas(d, o, *o.ranks);
  return o;
}

TEST(Contract, RandomPlansTrainLikeOneRank) {
  for (uint64_t trial = 0; trial < test::plans(60); ++trial) {
    SCOPED_TRACE(trial);
    expect_passes(draw_plan(trial));
  }
}

TEST(Contract, EachStrategyAndStage) {
  for (const char* dtype : {"fp32", "bf16"})
    for (const int64_t ranks : {2, 3}) {
      TrainOptions o = small_plan();
      o["dtype"] = dtype;
      o.ranks = ranks;
      o["microbatches"] = 2;
      for (const int64_t zero : {0, 1, 2, 3}) o["zero"] = zero, expect_passes(o);
      o["zero"] = 0;
      for (const char* mode : {"dataparallel", "ps-sync"}) {
        o["dp_mode"] = mode;
        expect_passes(o);
      }
    }
}

// The default model and the path without parallelism.
TEST(Contract, OneRankIsItsOwnOracle) {
  TrainOptions o = small_plan();
  say(o, "ranks=1 microbatches=3");
  expect_passes(o);
  for (const int64_t zero : {1, 2, 3}) o["zero"] = zero, expect_passes(o);  // any stage is accepted where the axis is 1
}

// A copy for each use of the tied weight, without a pipeline that needs it.
TEST(Contract, CopiesOfATiedWeightAreSummedApart) {
  for (const int64_t zero : {0, 3}) {
    TrainOptions o = verify_defaults();
    say(o, "layers=2 heads=2 channels=16 context=8 batch=8 steps=4 ranks=2 microbatches=2");
    o["zero"] = zero;
    say(o, "tie_copies=true threads_per_rank=1");
    const VerifyResult r = verify(job_of(o));
    EXPECT_TRUE(r.passed() && r.bitwise) << test::command_of(o) << "\n" << (r.passed() ? "" : r.failures.front());
  }
}

TEST(Contract, TheLossFalls) {
  TrainOptions o = small_plan();
  o["steps"] = 40;
  say(o, "ranks=2 zero=3");
  const VerifyResult r = verify(job_of(o));
  EXPECT_TRUE(r.passed());
  EXPECT_LT(r.losses.back(), r.losses.front() - 0.2);
}

}  // namespace
}  // namespace tessera
