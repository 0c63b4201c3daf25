// Experts beside owners of matrices and groups of shards, held to the contract.

#include <cstring>

#include "tests/verify/draw.h"
#include "verify/defects/planting.h"

namespace tessera {
namespace {

using test::Draw;
using test::expect_passes;

// A short plan of so many data ranks, whose model has experts, and maybe adapters.
TrainOptions draw_with_experts(Draw& d, int64_t dp, int64_t lora_rank = 0) {
  TrainOptions o = test::small_plan();
  say(o, "channels=16 steps=5");
  o["dp"] = dp;
  o["microbatches"] = d.between(1, 2);
  o["batch"] = dp * o.plan.microbatches;
  o["family"] = d.of<const char*>({"gpt2", "llama"});
  o["ffn"] = d.between(4, 40);
  o["lora_rank"] = lora_rank;
  o["dtype"] = d.of<const char*>({"fp32", "fp32", "bf16", "fp64"});
  o["recompute"] = d.of<const char*>({"none", "none", "block"});
  o["all_reduce"] = d.of<const char*>({"direct", "direct", "tree", "root"});
  do forget(o, {"experts"});  // every trial has some
  while (test::draw_experts(d, o, dp), !o.gives("experts"));
  return o;
}

TrainOptions small_experts() {
  TrainOptions o = test::small_plan();
  say(o, "channels=16 steps=2 batch=8 experts=4");
  return o;
}

TEST(ExpertsContract, MuonTrainsLikeOneRankToTheBit) {
  for (uint64_t trial = 0; trial < test::plans(14); ++trial) {
    Draw d("experts of muon", trial);
    TrainOptions o = draw_with_experts(d, d.of<int64_t>({1, 2, 4, 4, 6}));
    say(o, "optimizer=muon lr=0.02");
    o["momentum"] = d.of({0.0, 0.95});
    o["zero"] = d.between(0, 3);
    o["untied"] = d.between(0, 1) == 1;
    if (o.plan.dp < 6 && d.between(0, 2) == 0) o["pp"] = 2;
    SCOPED_TRACE(trial);
    expect_passes(o);
  }
}

TEST(ExpertsContract, GroupsOfShardsTrainLikeOneRankToTheBit) {
  for (uint64_t trial = 0; trial < test::plans(14); ++trial) {
    Draw d("experts of groups", trial);
    TrainOptions o = draw_with_experts(d, d.of<int64_t>({4, 4, 6, 8}));
    o["zero"] = d.between(1, 3);
    o["optimizer"] = d.of<const char*>({"adamw", "sgd", "muon"});
    test::draw_groups(d, o, o.plan.dp);
    if (o.plan.dp == 4 && d.between(0, 2) == 0) o["pp"] = 2;
    SCOPED_TRACE(trial);
    expect_passes(o);
  }
}

TEST(ExpertsContract, GroupsOfShardsBesideTensorAndContextRanks) {
  for (const bool context : {false, true}) {
    TrainOptions o = small_experts();
    o[context ? "cp" : "tp"] = 2;
    o["dp"] = context ? 2 : 4;
    o["ep"] = 2;
    o["zero"] = context ? 3 : 2;
    o["shard_ranks"] = 2;
    expect_passes(o);
  }
}

TEST(ExpertsContract, AdaptersBesideFrozenExpertsTrainLikeOneRankToTheBit) {
  for (uint64_t trial = 0; trial < test::plans(14); ++trial) {
    Draw d("experts of adapters", trial);
    const int64_t dp = d.of<int64_t>({1, 2, 4, 4});
    const int64_t rank = d.between(1, 3);
    TrainOptions o = draw_with_experts(d, dp, rank);
    o["lora_dropout"] = d.of({0.0, 0.2});
    o["zero"] = d.between(0, 3);
    if (o.plan.zero != ZeroStage::none && d.between(0, 1) == 0) test::draw_groups(d, o, dp);
    if (d.between(0, 2) == 0) o["pp"] = 2;
    SCOPED_TRACE(trial);
    expect_passes(o);
  }
}

TEST(ExpertsContract, AdaptersBesideFrozenExpertsOnTensorAndContextRanks) {
  for (const char* axis : {"tp", "sp", "cp"}) {
    TrainOptions o = small_experts();
    say(o, "family=llama lora_rank=2 lora_targets=all shared_experts=1");
    o["dp"] = o["ep"] = 2;
    o[axis == std::string("cp") ? "cp" : "tp"] = 2;
    o["sp"] = axis == std::string("sp");
    o["dtype"] = "fp64";
    o["zero"] = o.plan.sp ? 3 : 1;
    expect_passes(o);
  }
}

// A bit of an expert that should have stayed.
TEST(ExpertsContract, AFrozenExpertThatChangesIsSeen) {
  TrainOptions o = small_experts();
  o["lora_rank"] = 2;
  o["dp"] = o["ep"] = 2;
  o["family"] = "llama";
  for (const int64_t zero : {0, 3}) {
    o["zero"] = zero;
    VerifyHooks hooks;
    hooks.update = [](Trainer& t, const StepReport& report) {
      t.update(report);
      for (const FlatUnit& unit : t.strategy().residents())
        if (t.world().rank() == 1 && unit.slots[0].parameter->is_expert) unit.values.raw()[0] ^= std::byte{1};
    };
    EXPECT_TRUE(verify(job_of(o)).passed());
    EXPECT_FALSE(verify(job_of(o), hooks).passed());
  }
}

TEST(ExpertsContract, TensorRanksGatherMatricesOfExperts) {
  for (const int64_t zero : {0, 1, 3}) {
    TrainOptions o = small_experts();
    o["tp"] = o["dp"] = o["ep"] = 2;
    o["dtype"] = "fp64";
    o["family"] = zero == 1 ? "gpt2" : "llama";
    o["sp"] = zero == 3;
    say(o, "optimizer=muon shared_experts=1");
    o["ffn"] = 37;  // which is cut unevenly
    o["zero"] = zero;
    expect_passes(o);
  }
}

// An owner among the ranks that have an expert is silent; the owners of all else do their part.
TEST(ExpertsContract, AnOwnerOfExpertsThatDoesNotSendIsSeen) {
  TrainOptions o = small_experts();
  say(o, "dp=4 ep=2 optimizer=muon");
  expect_passes(o);
  VerifyHooks hooks;
  spoil(hooks, {[](const std::string& axis, const Call& call) { return axis == "edp" && call.op == Op::broadcast; },
                [](Transport&, const Call&) { return int64_t{0}; }});
  const VerifyResult r = verify(job_of(o), hooks);
  EXPECT_FALSE(r.passed());
  ASSERT_FALSE(r.seen.copies.empty());
  EXPECT_NE(r.seen.copies.front().find(".experts."), std::string::npos) << r.seen.copies.front();
}

// Each on its own: experts that few ranks have, cut over two of a group of four, and summed over two groups.
TEST(ExpertsContract, GroupsThatDoNotSumAreSeen) {
  TrainOptions o = small_experts();
  say(o, "dp=8 ep=2 zero=2 shard_ranks=4");
  expect_passes(o);
  for (const char* name : {"unsummed-group", "wrong-group", "experts-summed-over-all"}) {
    const VerifyResult r = explain(job_of(o), [&](const Job& j) { return planted(defect(name), j); });
    EXPECT_FALSE(r.passed()) << name;
    ASSERT_FALSE(r.diagnosis.empty()) << name;
    EXPECT_EQ(r.diagnosis[0].cause, defect(name).cause) << name << " is taken for " << r.diagnosis[0].cause;
  }
  VerifyHooks hooks;
  spoil(hooks,
        {[](const std::string& axis, const Call& call) { return axis == "edp" && call.op == Op::reduce_scatter; },
         [](Transport& transport, const Call& call) {
           const int64_t sent = transport.direct(call);
           std::memset(call.out, 0, static_cast<size_t>(size_of(call.dtype)));  // one element
           return sent;
         }});
  EXPECT_FALSE(verify(job_of(o), hooks).passed());
}

}  // namespace
}  // namespace tessera
