// Groups of ranks, ranks that train alone, owners of matrices, and experts beside them, held to the contract.
#include <cstring>

#include "tests/support/errors.h"
#include "tests/support/gpus.h"
#include "tests/verify/draw.h"
#include "train/checkpoint/state.h"
#include "verify/defects/defects.h"
#include "verify/defects/planting.h"

namespace tessera {
namespace {

using test::Draw;
using test::expect_passes;

TrainOptions short_plan(int64_t dp) {
  TrainOptions o = test::small_plan();
  say(o, "channels=16 steps=6");
  o["dp"] = dp;
  o["batch"] = dp * 2;
  return o;
}

// Two sums, in every order: within a group, and over the groups.
TEST(ReplicasContract, GroupsOfShardsTrainLikeOneRankToTheBit) {
  for (uint64_t trial = 0; trial < test::plans(14); ++trial) {
    Draw d("groups", trial);
    TrainOptions o = short_plan(d.of<int64_t>({4, 4, 6, 8}));
    o["shard_ranks"] = o.plan.dp == 6 ? d.of<int64_t>({2, 3}) : d.of<int64_t>({1, 2, o.plan.dp / 2, o.plan.dp});
    o["zero"] = d.between(1, 3);
    o["microbatches"] = d.between(1, 3);
    o["batch"] = o.plan.dp * o.plan.microbatches;
    o["all_reduce"] = d.of<const char*>({"direct", "ring", "tree", "root"});
    o["dtype"] = d.of<const char*>({"fp32", "bf16", "fp64"});
    o["optimizer"] = d.of<const char*>({"adamw", "sgd", "muon"});
    o["untied"] = d.between(0, 1) == 1;
    if (o.plan.dp == 4 && d.between(0, 2) == 0) o["pp"] = 2;
    SCOPED_TRACE(trial);
    expect_passes(o);
  }
}

TEST(ReplicasContract, GroupsBesideTensorAndContextRanks) {
  TrainOptions o = short_plan(4);
  say(o, "zero=2 shard_ranks=2 tp=2 steps=2");
  expect_passes(o);
  o = short_plan(2);
  say(o, "steps=2 zero=3 shard_ranks=2 cp=2 context=16");
  expect_passes(o);
}

TEST(ReplicasContract, MuonTrainsLikeOneRankToTheBit) {
  for (uint64_t trial = 0; trial < test::plans(14); ++trial) {
    Draw d("muon", trial);
    TrainOptions o = short_plan(d.of<int64_t>({1, 2, 3, 4}));
    say(o, "optimizer=muon lr=0.02");
    o["momentum"] = d.of({0.0, 0.95});
    o["zero"] = d.between(0, 3);
    o["microbatches"] = d.between(1, 2);
    o["batch"] = o.plan.dp * o.plan.microbatches;
    o["dtype"] = d.of<const char*>({"fp32", "fp32", "bf16", "fp64"});
    o["family"] = d.of<const char*>({"gpt2", "llama"});
    o["kv_heads"] = d.of<int64_t>({1, 2});
    o["offload"] = d.of<const char*>({"none", "none", "optimizer"});
    if (d.between(0, 2) == 0) o["pp"] = 2;
    if (!o.plan.pp && d.between(0, 2) == 0) o["zero"] = 0, o["dp_mode"] = "dataparallel";
    SCOPED_TRACE(trial);
    expect_passes(o);
  }
}

TEST(ReplicasContract, TensorRanksGatherMatrices) {
  for (const auto& [family, zero] : {std::pair{"gpt2", 0}, {"llama", 3}}) {
    TrainOptions o = short_plan(2);
    o["optimizer"] = "muon";
    o["family"] = family;
    o["tp"] = 2;
    o["ffn"] = 37;  // which is cut unevenly
    o["zero"] = zero;
    o["steps"] = 2;
    expect_passes(o);
  }
}

TEST(ReplicasContract, RanksThatTrainAloneAreReplayedToTheBit) {
  for (uint64_t trial = 0; trial < test::plans(14); ++trial) {
    Draw d("diloco", trial);
    TrainOptions o = short_plan(d.of<int64_t>({1, 2, 3, 4}));
    o["channels"] = d.of<int64_t>({16, 24});  // 24: there are gaps between parameters
    o["dp_mode"] = "diloco";
    o["layers"] = d.between(2, 4);
    o["sync_every"] = d.between(1, 4);
    o["sync_fragments"] = d.between(1, std::min(o.plan.sync_every, o.sizes.layers));
    o["untied"] = d.between(0, 2) == 0;
    o["outer_lr"] = d.of({0.7, 1.0});
    o["outer_momentum"] = d.of({0.0, 0.9});
    o["microbatches"] = d.between(1, 2);
    o["batch"] = o.plan.dp * o.plan.microbatches;
    o["optimizer"] = d.of<const char*>({"adamw", "sgd", "muon"});
    o["clip"] = d.of({0.0, 0.1});
    o["dtype"] = d.of<const char*>({"fp32", "bf16", "fp64"});
    o["grad_dtype"] = text_of(o.optim.dtype) == "fp64" ? "fp32" : d.of<const char*>({"fp32", "bf16"});
    o["lora_rank"] = d.of<int64_t>({0, 0, 2});
    if (o.sizes.lora.rank > 0) o["optimizer"] = "adamw";
    if (text_of(o.optim.dtype) == "bf16" && text_of(o.optim.optimizer) != "muon")
      o["state_dtype"] = d.of<const char*>({"fp32", "bf16"});
    o["offload"] = d.of<const char*>({"none", "none", "optimizer"});
    if (d.between(0, 2) == 0) o["pp"] = 2;
    o["all_reduce"] =
        o.plan.pp ? d.of<const char*>({"direct", "tree"}) : d.of<const char*>({"direct", "ring", "tree", "root"});
    SCOPED_TRACE(trial);
    expect_passes(o);
  }
}

TEST(ReplicasContract, RanksThatTrainAloneBesideTensorAndContextRanks) {
  for (uint64_t trial = 0; trial < test::plans(8); ++trial) {
    Draw d("diloco groups", trial);
    TrainOptions o = short_plan(d.of<int64_t>({2, 3}));
    say(o, "dp_mode=diloco steps=4");
    o["layers"] = d.between(2, 4);
    o["sync_every"] = d.between(1, 3);
    o["sync_fragments"] = d.between(1, 2);
    o["sync_fragments"] = std::min(o.plan.sync_fragments, o.plan.sync_every);
    const int64_t axis = d.between(0, 2);
    if (axis != 1) o["tp"] = 2;
    if (axis != 0) o["cp"] = 2;
    if (o.plan.dp == 2 && axis != 2 && d.between(0, 1) == 1) o["pp"] = 2;
    o["cp_mode"] = d.of<const char*>({"ring", "ulysses"});
    if (axis == 2) o["cp_mode"] = "ring";
    o["dtype"] = d.of<const char*>({"fp32", "bf16", "fp64"});
    o["all_reduce"] =
        o.plan.pp || o.plan.tp ? d.of<const char*>({"direct", "tree"}) : d.of<const char*>({"direct", "ring", "root"});
    SCOPED_TRACE(trial);
    expect_passes(o);
  }
}

// An outer step that is left out is seen in the step in which its fragment should make it.
TEST(ReplicasContract, AForgottenFragmentIsSeen) {
  TrainOptions o = short_plan(2);
  say(o, "dp_mode=diloco sync_every=4 sync_fragments=2");
  const VerifyResult r = explain(job_of(o), [](const Job& j) { return planted(defect("forgotten-outer-step"), j); });
  ASSERT_FALSE(r.passed());
  EXPECT_EQ(r.wrong_steps.front(), 2);
  EXPECT_EQ(r.diagnosis.at(0).cause, "outer-step");
  for (const TensorDifference& t : r.seen.tensors)
    EXPECT_TRUE(t.step != 2 || t.name.starts_with("blocks.1.") || t.name.starts_with("norm.")) << t.name;
}

std::vector<Tensor> trained(const Job& job) {
  std::vector<Tensor> out;
  launch(launch_options(job.plan), [&](Communicator& world) {
    Trainer trainer(job, counted_sequences(job.model.vocab, job.model.context, job.optim.batch, 1), world);
    for (int64_t i = 0; i < job.optim.steps; ++i) trainer.step();
    const std::vector<NamedTensor> values = whole_values(trainer);
    if (world.rank() == 0)
      for (const NamedTensor& t : values) out.push_back(t.tensor.contiguous().clone());
  });
  return out;
}

void expect_near(const std::vector<Tensor>& found, const std::vector<Tensor>& expected) {
  ASSERT_EQ(found.size(), expected.size());
  for (size_t i = 0; i < expected.size(); ++i) {
    double square = 0, distance = 0;
    for (int64_t e = 0; e < expected[i].numel(); ++e) {
      const double a = expected[i].data<double>()[e], b = found[i].data<double>()[e];
      square += a * a;
      distance += (a - b) * (a - b);
    }
    EXPECT_LE(distance, 1e-24 * square) << i;
  }
}

// Every step a sum, plain SGD inside and outside: data parallelism, but for the order of operations.
void expect_ddp_with_one_step_alone(TrainOptions o) {
  say(o, "steps=10 optimizer=sgd momentum=0 weight_decay=0 clip=0 lr=0.3 dtype=fp64 outer_lr=1 outer_momentum=0");
  const std::vector<Tensor> ddp = trained(job_of(o));
  o["dp_mode"] = "diloco";
  const std::vector<Tensor> alone = trained(job_of(o));
  expect_near(alone, ddp);
  o["sync_every"] = 2;
  const std::vector<Tensor> two = trained(job_of(o));
  EXPECT_NE(two[0].data<double>()[5], ddp[0].data<double>()[5]);
}

TEST(ReplicasContract, WithOneStepAloneItIsDdp) { expect_ddp_with_one_step_alone(short_plan(4)); }

// Ranks with a GPU each, or that share one.
using ReplicasContractGpu = test::OnGpu;
TEST_F(ReplicasContractGpu, WithOneStepAloneItIsDdp) {
  if (const std::string why = test::no_float64(); !why.empty()) GTEST_SKIP() << why;
  TrainOptions o = short_plan(4);
  o["device"] = "cuda";
  expect_ddp_with_one_step_alone(o);
}

using ReplicasContractGpus = test::OnGpus;
TEST_F(ReplicasContractGpus, OverNcclTheyTrainAsThreadsDo) {
  if (const std::string why = test::no_float64(); !why.empty()) GTEST_SKIP() << why;
  TrainOptions o = short_plan(2);
  say(o, "device=cuda dtype=fp64 layers=3 sync_every=3 sync_fragments=2 dp_mode=diloco");
  for (const bool context : {false, true}) {
    if (context) o["cp"] = 2, o["cp_mode"] = "ulysses";
    if (context && gpus < 4) continue;
    o["backend"] = "threads", o["all_reduce"] = "direct";
    const std::vector<Tensor> threads = trained(job_of(o));
    o["backend"] = "nccl", o["all_reduce"] = "native";
    expect_near(trained(job_of(o)), threads);
  }
}

TEST(ReplicasContract, PlansThatCannotBeAreRefused) {
  const auto refused = [](TrainOptions o, const std::string& words) {
    const std::string what = error_of([&] { check(job_of(o)); });
    EXPECT_TRUE(has(what, words));
  };
  TrainOptions o = short_plan(4);
  o["shard_ranks"] = 2;
  refused(o, "`shard_ranks`: goes with `zero` 1, 2 or 3");
  say(o, "zero=1 shard_ranks=3");
  refused(o, "groups of 3 ranks do not divide the 4 that share the batch; the nearest that do: 2 or 4");
  o = short_plan(4);
  o["sync_every"] = 5;
  refused(o, "`sync_every`: goes with `dp_mode` diloco");
  say(o, "dp_mode=diloco zero=1");
  refused(o, "`zero`");
  say(o, "zero=0 sync_fragments=3");
  refused(o, "`sync_fragments`: a fragment has at least one of the 2 layers; expected at most 2, found 3");
  say(o, "layers=9 sync_fragments=6");
  refused(o,
          "`sync_fragments`: each fragment makes its outer steps in other steps, of which there are 5 "
          "(`sync_every`); expected at most 5, found 6");
  say(o, "sync_fragments=2 pp=2 all_reduce=ring");
  refused(o, "`all_reduce`");
  say(o, "pp=1 tp=2");
  refused(o, "`all_reduce`: a ring may add");
  say(o, "backend=nccl device=cuda all_reduce=native");
  refused(o, "expected direct, tree or root, and `backend` threads or mpi");
  o = short_plan(4);
  o["sync_fragments"] = 2;
  refused(o, "`sync_fragments`: goes with `dp_mode` diloco, found ddp");
  o = short_plan(2);
  say(o, "optimizer=muon dp_mode=ps-sync");
  refused(o, "`optimizer`: muon needs whole matrices");
  say(o, "dp_mode=ddp lora_rank=2");
  refused(o, "`optimizer`: muon is for matrices of layers");
}

// Experts beside owners of matrices and groups of shards, held to the contract.

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
  EXPECT_TRUE(has(r.seen.copies.front(), ".experts."));
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
