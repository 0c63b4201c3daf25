// Verification of sharding groups, local updates, owners of matrices, and their combination with experts.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>
#include <tuple>
#include <vector>

#include "tests/support/errors.h"
#include "tests/support/gpus.h"
#include "tests/support/tensors.h"
#include "tests/verify/draw.h"
#include "train/check.h"
#include "train/checkpoint/full_state.h"
#include "verify/defects/planting.h"

namespace tessera {
namespace {

using namespace test;

TypedOptions short_plan(int64_t dp, std::string_view options = {}) {
  return small_plan(fmt::format("channels=16 steps=6 dp={} batch={} {}", dp, dp * 2, options));
}

// Gradients are reduced within groups and between groups; random plans cover every order of summation.
TEST(ReplicasContract, ShardingGroupsMatchOneRankExactly) {
  expect_random_pass(14, "groups", [](Sampler& d) {
    TypedOptions o = short_plan(d.of<int64_t>({4, 4, 6, 8}));
    o["shard_ranks"] = o.plan.dp == 6 ? d.of<int64_t>({2, 3}) : d.of<int64_t>({1, 2, o.plan.dp / 2, o.plan.dp});
    sample(d, o, "zero=1..3 microbatches=1..3");
    o["batch"] = o.plan.dp * o.plan.microbatches;
    sample(d, o, "all_reduce=direct|ring|tree|root dtype=fp32|bf16|fp64 optimizer=adamw|sgd|muon untied=false|true");
    if (o.plan.dp == 4 && d.between(0, 2) == 0) o["pp"] = 2;
    return o;
  });
}

TEST(ReplicasContract, GroupsWithTensorAndContextRanksTrainLikeOneRank) {
  expect_passes(short_plan(4), {"zero=2 shard_ranks=2 tp=2 steps=2"});
  expect_passes(short_plan(2), {"zero=3 shard_ranks=2 cp=2 context=16 steps=2"});
}

TEST(ReplicasContract, MuonMatchesOneRankExactly) {
  expect_random_pass(14, "muon", [](Sampler& d) {
    TypedOptions o = short_plan(d.of<int64_t>({1, 2, 3, 4}));
    sample(d, o, "optimizer=muon lr=0.02 momentum=0|0.95 zero=0..3 microbatches=1..2");
    o["batch"] = o.plan.dp * o.plan.microbatches;
    sample(d, o, "dtype=fp32|fp32|bf16|fp64 family=gpt2|llama kv_heads=1|2 offload=none|none|optimizer");
    if (d.between(0, 2) == 0) o["pp"] = 2;
    if (!o.plan.pp && d.between(0, 2) == 0) o["zero"] = 0, o["dp_mode"] = "dataparallel";
    return o;
  });
}

TEST(ReplicasContract, TensorRanksGatherMatricesForMuon) {
  // 37 is sharded unevenly.
  expect_passes(short_plan(2, "optimizer=muon tp=2 ffn=37 steps=2"), {"family=gpt2 zero=0", "family=llama zero=3"});
}

TEST(ReplicasContract, LocalUpdatesMatchReplayExactly) {
  expect_random_pass(14, "diloco", [](Sampler& d) {
    TypedOptions o = short_plan(d.of<int64_t>({1, 2, 3, 4}));
    o["channels"] = d.of<int64_t>({16, 24});  // 24: gaps between parameters
    sample(d, o, "dp_mode=diloco layers=2..4 sync_every=1..4");
    o["sync_fragments"] = d.between(1, std::min(o.plan.sync_every, o.model.layers));
    sample(d, o, "untied=true|false|false outer_lr=0.7|1 outer_momentum=0|0.9 microbatches=1..2");
    o["batch"] = o.plan.dp * o.plan.microbatches;
    sample(d, o, "optimizer=adamw|sgd|muon clip=0|0.1 dtype=fp32|bf16|fp64");
    o["grad_dtype"] = value_name(o.optim.dtype) == "fp64" ? "fp32" : d.of<const char*>({"fp32", "bf16"});
    o["lora_rank"] = d.of<int64_t>({0, 0, 2});
    if (o.model.lora.rank > 0) o["optimizer"] = "adamw";
    if (value_name(o.optim.dtype) == "bf16" && value_name(o.optim.optimizer) != "muon")
      o["state_dtype"] = d.of<const char*>({"fp32", "bf16"});
    o["offload"] = d.of<const char*>({"none", "none", "optimizer"});
    if (d.between(0, 2) == 0) o["pp"] = 2;
    sample(d, o, o.plan.pp ? "all_reduce=direct|tree" : "all_reduce=direct|ring|tree|root");
    return o;
  });
}

TEST(ReplicasContract, LocalUpdatesWithTensorAndContextRanksMatchReplay) {
  expect_random_pass(8, "diloco groups", [](Sampler& d) {
    TypedOptions o = short_plan(d.of<int64_t>({2, 3}));
    sample(d, o, "dp_mode=diloco steps=4 layers=2..4 sync_every=1..3 sync_fragments=1..2");
    o["sync_fragments"] = std::min(o.plan.sync_fragments, o.plan.sync_every);
    const int64_t axis = d.between(0, 2);
    if (axis != 1) o["tp"] = 2;
    if (axis != 0) o["cp"] = 2;
    if (o.plan.dp == 2 && axis != 2 && d.between(0, 1) == 1) o["pp"] = 2;
    sample(d, o, axis == 2 ? "cp_mode=ring|ring" : "cp_mode=ring|ulysses");
    sample(d, o, "dtype=fp32|bf16|fp64");
    sample(d, o, o.plan.pp || o.plan.tp ? "all_reduce=direct|tree" : "all_reduce=direct|ring|root");
    return o;
  });
}

VerifyResult explain_injected(const char* name, const TypedOptions& o) {
  return explain(resolve(o), [&](const TrainConfig& j) { return with_fault_if_applicable(find_fault(name), j); });
}

// A skipped outer step is detected in the step where its fragment is due.
TEST(ReplicasContract, DetectsSkippedFragment) {
  const VerifyResult r =
      explain_injected("forgotten-outer-step", short_plan(2, "dp_mode=diloco sync_every=4 sync_fragments=2"));
  ASSERT_FALSE(r.passed());
  EXPECT_EQ(r.wrong_steps.front(), 2);
  EXPECT_EQ(r.diagnosis.at(0).cause, "outer-step");
  for (const TensorDifference& t : r.seen.tensors)
    EXPECT_TRUE(t.step != 2 || t.name.starts_with("blocks.1.") || t.name.starts_with("norm.")) << t.name;
}

std::vector<Tensor> trained(const TypedOptions& o) {
  const TrainConfig job = resolve(o);
  std::vector<Tensor> out;
  on_ranks(job, [&](Trainer& trainer) {
    for (int64_t i = 0; i < job.optim.steps; ++i) trainer.step();
    const std::vector<NamedTensor> values = full_values(trainer.state());
    if (trainer.state().groups.world.rank() == 0)
      for (const NamedTensor& t : values) out.push_back(t.tensor.contiguous().clone());
  });
  return out;
}

void expect_near(const std::vector<Tensor>& found, const std::vector<Tensor>& expected) {
  ASSERT_EQ(found.size(), expected.size());
  for (size_t i = 0; i < expected.size(); ++i) EXPECT_LE(distance(found[i], expected[i]), 1e-12) << i;
}

// With synchronization in every step and plain SGD as inner and outer optimizer, local updates equal data parallelism
// except for the order of operations.
void expect_one_local_step_matches_ddp(TypedOptions o) {
  say(o, "steps=10 optimizer=sgd momentum=0 weight_decay=0 clip=0 lr=0.3 dtype=fp64 outer_lr=1 outer_momentum=0");
  const std::vector<Tensor> ddp = trained(o);
  o["dp_mode"] = "diloco";
  expect_near(trained(o), ddp);
  o["sync_every"] = 2;
  EXPECT_NE(trained(o)[0].data<double>()[5], ddp[0].data<double>()[5]);
}

TEST(ReplicasContract, OneLocalStepMatchesDdp) { expect_one_local_step_matches_ddp(short_plan(4)); }

// Ranks with one GPU each, or sharing one.
using ReplicasContractGpu = test::OnGpu;
TEST_F(ReplicasContractGpu, OneLocalStepMatchesDdp) {
  if (const std::string why = no_float64(); !why.empty()) GTEST_SKIP() << why;
  expect_one_local_step_matches_ddp(short_plan(4, "device=cuda"));
}

using ReplicasContractGpus = test::OnGpus;
TEST_F(ReplicasContractGpus, NcclRanksMatchThreadRanks) {
  if (const std::string why = no_float64(); !why.empty()) GTEST_SKIP() << why;
  for (const std::string options : {"", " cp=2 cp_mode=ulysses"}) {
    if (!options.empty() && gpus < 4) continue;
    const TypedOptions threads =
        short_plan(2, "device=cuda dtype=fp64 layers=3 sync_every=3 sync_fragments=2 dp_mode=diloco" + options);
    TypedOptions over_nccl = threads;
    say(over_nccl, "backend=nccl all_reduce=native");
    expect_near(trained(over_nccl), trained(threads));
  }
}

TEST(ReplicasContract, RejectsInvalidPlans) {
  const std::tuple<int64_t, const char*, const char*> cases[] = {
      {4, "shard_ranks=2", "`shard_ranks`: requires `zero` 1, 2 or 3"},
      {4, "zero=1 shard_ranks=3", "groups of 3 ranks do not divide the 4 data ranks; nearest valid value: 2 or 4"},
      {4, "sync_every=5", "`sync_every`: requires `dp_mode` diloco"},
      {4, "sync_every=5 dp_mode=diloco zero=1", "`zero`"},
      {4, "sync_every=5 dp_mode=diloco sync_fragments=3",
       "`sync_fragments`: each fragment has at least one of the 2 layers; expected at most 2, got 3"},
      {4, "sync_every=5 dp_mode=diloco layers=9 sync_fragments=6",
       "`sync_fragments`: each fragment is synchronized at a different one of the 5 steps (`sync_every`); expected at "
       "most 5, got 6"},
      {4, "dp_mode=diloco pp=2 all_reduce=ring", "`all_reduce`"},
      {4, "dp_mode=diloco tp=2 all_reduce=ring", "`all_reduce`: a ring may sum"},
      {4, "dp_mode=diloco tp=2 backend=nccl device=cuda all_reduce=native",
       "expected direct, tree or root, and `backend` threads or mpi"},
      {4, "sync_fragments=2", "`sync_fragments`: requires `dp_mode` diloco, got ddp"},
      {2, "optimizer=muon dp_mode=ps-sync", "`optimizer`: muon requires full matrices"},
      {2, "optimizer=muon lora_rank=2", "`optimizer`: muon updates the weight matrices of the layers"}};
  for (const auto& [dp, plan, refusal] : cases) {
    const TypedOptions o = short_plan(dp, plan);
    EXPECT_TRUE(has(error_message([&] { check(resolve(o)); }), refusal)) << plan;
  }
}

// Experts combined with owners of matrices and sharding groups.

// A short plan with the given data ranks, whose model has experts and optionally adapters.
TypedOptions sample_with_experts(Sampler& d, int64_t dp, int64_t lora_rank = 0) {
  TypedOptions o = small_plan("channels=16 steps=5");
  o["dp"] = dp;
  o["microbatches"] = d.between(1, 2);
  o["batch"] = dp * o.plan.microbatches;
  sample(d, o, "family=gpt2|llama ffn=4..40");
  o["lora_rank"] = lora_rank;
  sample(d, o, "dtype=fp32|fp32|bf16|fp64 recompute=none|none|block all_reduce=direct|direct|tree|root");
  sample_some_experts(d, o, dp);
  return o;
}

TypedOptions small_experts(const std::string& options) {
  return small_plan("channels=16 steps=2 batch=8 experts=4 " + options);
}

TEST(ExpertsContract, MuonMatchesOneRankExactly) {
  expect_random_pass(14, "experts of muon", [](Sampler& d) {
    TypedOptions o = sample_with_experts(d, d.of<int64_t>({1, 2, 4, 4, 6}));
    sample(d, o, "optimizer=muon lr=0.02 momentum=0|0.95 zero=0..3 untied=false|true");
    if (o.plan.dp < 6 && d.between(0, 2) == 0) o["pp"] = 2;
    return o;
  });
}

TEST(ExpertsContract, ShardingGroupsMatchOneRankExactly) {
  expect_random_pass(14, "experts of groups", [](Sampler& d) {
    TypedOptions o = sample_with_experts(d, d.of<int64_t>({4, 4, 6, 8}));
    sample(d, o, "zero=1..3 optimizer=adamw|sgd|muon");
    sample_groups(d, o, o.plan.dp);
    if (o.plan.dp == 4 && d.between(0, 2) == 0) o["pp"] = 2;
    return o;
  });
}

TEST(ExpertsContract, ShardingGroupsWithTensorAndContextRanksTrainLikeOneRank) {
  expect_passes(small_experts("ep=2 shard_ranks=2"), {"tp=2 dp=4 zero=2", "cp=2 dp=2 zero=3"});
}

TEST(ExpertsContract, AdaptersWithFrozenExpertsMatchOneRankExactly) {
  expect_random_pass(14, "experts of adapters", [](Sampler& d) {
    const int64_t dp = d.of<int64_t>({1, 2, 4, 4});
    const int64_t rank = d.between(1, 3);
    TypedOptions o = sample_with_experts(d, dp, rank);
    sample(d, o, "lora_dropout=0|0.2 zero=0..3");
    if (o.plan.zero != ZeroStage::none && d.between(0, 1) == 0) sample_groups(d, o, dp);
    if (d.between(0, 2) == 0) o["pp"] = 2;
    return o;
  });
}

TEST(ExpertsContract, AdaptersWithFrozenExpertsTrainLikeOneRankOnTensorAndContextRanks) {
  expect_passes(small_experts("family=llama lora_rank=2 lora_targets=all shared_experts=1 dp=2 ep=2 dtype=fp64"),
                {"tp=2 zero=1", "tp=2 sp=true zero=3", "cp=2 zero=1"});
}

// Flips a bit of a frozen expert.
TEST(ExpertsContract, DetectsModifiedFrozenExpert) {
  for (const std::string zero : {"zero=0", "zero=3"}) {
    const TypedOptions o = small_experts("lora_rank=2 dp=2 ep=2 family=llama " + zero);
    const VerifyHooks hooks = {.update = [](Trainer& t, const StepReport& report) {
      t.update(report);
      for (const FlatUnit& unit : t.state().strategy().resident_units())
        if (t.state().groups.world.rank() == 1 && unit.slots[0].parameter->is_expert)
          unit.values.raw()[0] ^= std::byte{1};
    }};
    EXPECT_TRUE(verify(resolve(o)).passed()) << zero;
    EXPECT_FALSE(verify(resolve(o), hooks).passed()) << zero;
  }
}

TEST(ExpertsContract, TensorRanksGatherExpertMatricesForMuon) {
  // 37 is sharded unevenly.
  expect_passes(small_experts("tp=2 dp=2 ep=2 dtype=fp64 optimizer=muon shared_experts=1 ffn=37"),
                {"family=llama zero=0", "family=gpt2 zero=1", "family=llama zero=3 sp=true"});
}

// One owner among an expert's ranks sends nothing; all other owners send.
TEST(ExpertsContract, DetectsExpertOwnerWithoutBroadcast) {
  const TypedOptions o = small_experts("dp=4 ep=2 optimizer=muon");
  expect_passes(o);
  VerifyHooks hooks;
  inject(hooks, {[](const std::string& axis, const Call& call) { return axis == "edp" && call.op == Op::broadcast; },
                 [](Transport&, const Call&) { return int64_t{0}; }});
  const VerifyResult r = verify(resolve(o), hooks);
  EXPECT_FALSE(r.passed());
  ASSERT_FALSE(r.seen.copies.empty());
  EXPECT_TRUE(has(r.seen.copies.front(), ".experts."));
}

// Experts have fewer replicas: they are sharded over two ranks of a group of four and reduced over two groups.
TEST(ExpertsContract, DetectsMissingReductionAcrossGroups) {
  const TypedOptions o = small_experts("dp=8 ep=2 zero=2 shard_ranks=4");
  expect_passes(o);
  for (const char* name : {"unsummed-group", "wrong-group", "experts-summed-over-all"}) {
    const VerifyResult r = explain_injected(name, o);
    EXPECT_FALSE(r.passed()) << name;
    ASSERT_FALSE(r.diagnosis.empty()) << name;
    EXPECT_EQ(r.diagnosis[0].cause, find_fault(name).cause) << name << " is taken for " << r.diagnosis[0].cause;
  }
  VerifyHooks hooks;
  inject(hooks,
         {[](const std::string& axis, const Call& call) { return axis == "edp" && call.op == Op::reduce_scatter; },
          [](Transport& transport, const Call& call) {
            const int64_t sent = transport.direct(call);
            std::memset(call.out, 0, static_cast<size_t>(element_size(call.dtype)));  // one element
            return sent;
          }});
  EXPECT_FALSE(verify(resolve(o), hooks).passed());
}

}  // namespace
}  // namespace tessera
