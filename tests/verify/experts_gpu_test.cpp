// Mixtures of experts on GPUs: they train like one rank under every axis, defects are seen there, steps are not
// captured, and they train over NCCL.

#include "tests/support/gpus.h"
#include "tests/verify/draw.h"
#include "verify/defects/defects.h"

namespace tessera {
namespace {

using test::Draw;
using test::expect_passes;
using ExpertsTrainingGpu = test::OnGpu;
using ExpertsOverNcclGpu = test::OnGpus;

TrainOptions plan(std::string_view words) {
  TrainOptions o = test::small_plan();
  say(o, "device=cuda channels=16 context=8 batch=8 steps=3 experts=4 balance_loss=0.1");
  say(o, words);
  return o;
}

TEST_F(ExpertsTrainingGpu, EveryAxis) {
  for (const std::string_view words : std::vector<std::string_view>{
           "ranks=1 expert_capacity=0.7 shared_experts=1", "ranks=1 dtype=bf16 recompute=block microbatches=2",
           "ranks=2 ep=2 dtype=bf16", "ranks=4 ep=2 zero=3 recompute=activation",
           "ranks=4 ep=4 zero=1 family=llama dtype=bf16", "dp=2 ep=2 tp=2 sp=true dtype=fp64", "dp=2 ep=2 tp=2",
           "dp=2 ep=2 pp=2 microbatches=2 schedule=zb-h1", "cp=2 ep=2 family=llama",
           "cp=2 dp=2 ep=4 expert_capacity=0.7 shared_experts=1", "ranks=3 zero=2 batch=9",
           "ranks=2 zero=2 offload=optimizer"})
    expect_passes(plan(words));
}

TrainOptions draw_plan(uint64_t trial) {
  Draw d("experts on a GPU", trial);
  TrainOptions o = plan("");
  o["dtype"] = d.of<const char*>({"fp32", "bf16", "fp64"});
  o["dp"] = d.of<int64_t>({1, 2, 4});
  o["tp"] = d.of<int64_t>({1, 1, 2});
  o["cp"] = d.of<int64_t>({1, 1, 2});
  if (o.plan.tp * o.plan.cp == 1) o["pp"] = d.of<int64_t>({1, 2});
  o["sp"] = o.plan.tp > 1 && d.between(0, 1) == 1;
  o["zero"] = d.between(0, 3);
  o["microbatches"] = d.between(1, 2);
  o["batch"] = o.plan.dp * o.plan.microbatches * d.between(1, 2);
  o["heads"] = o.plan.tp * o.plan.cp;
  o["channels"] = o.sizes.heads * 4 * d.between(1, 4);
  o["family"] = d.of<const char*>({"gpt2", "llama"});
  o["recompute"] = d.of<const char*>({"none", "activation", "block"});
  do forget(o, {"experts"});  // every trial has some
  while (test::draw_experts(d, o, o.plan.dp * o.plan.cp), !o.gives("experts"));
  return o;
}

TEST_F(ExpertsTrainingGpu, RandomPlans) {
  for (uint64_t trial = 0; trial < test::plans(12); ++trial) {
    SCOPED_TRACE(trial);
    expect_passes(draw_plan(trial));
  }
}

TEST_F(ExpertsTrainingGpu, DefectsAreSeen) {
  const TrainOptions o = plan("ranks=2 ep=2");
  for (const char* name : {"misrouted-token", "swapped-expert-counts"}) {
    check_applies(defect(name), job_of(o));
    EXPECT_FALSE(verify(job_of(o), planted(defect(name), job_of(o))).passed()) << name;
  }
}

TEST(ExpertsStepGraph, IsNotCaptured) {
  TrainOptions o = plan("ranks=1");
  EXPECT_EQ(no_graph_because(job_of(o), false), "the host must know how many tokens each of the 4 `experts` gets");
  EXPECT_FALSE(steps_without_host(job_of(o), false));
  o["cuda_graph"] = "on";
  EXPECT_THROW(no_graph_because(job_of(o), false), Error);
  forget(o, {"experts"});
  EXPECT_EQ(no_graph_because(job_of(o), false), "");
}

std::vector<double> losses_of(const TrainOptions& o) {
  std::vector<double> losses;
  launch(launch_options(job_of(o).plan), [&](Communicator& world) {
    Trainer trainer(job_of(o), counted_sequences(o.sizes.vocab, o.sizes.context, o.optim.batch, 1), world);
    for (int64_t i = 0; i < o.optim.steps; ++i) {
      const double loss = trainer.step().loss;
      if (world.rank() == 0) losses.push_back(loss);
    }
  });
  return losses;
}

// Float64, where the order of sums shows in the last digits alone.
TEST_F(ExpertsOverNcclGpu, RanksTrainLikeOne) {
  if (const std::string why = test::no_float64(); !why.empty()) GTEST_SKIP() << why;
  const TrainOptions one = plan("ranks=1 dtype=fp64");
  const std::vector<double> alone = losses_of(one);
  for (const int64_t zero : {0, 2, 3}) {  // whose collectives run beside the messages of rows
    TrainOptions o = one;
    o.ranks = 2, o["ep"] = 2, o["zero"] = zero, o["backend"] = "nccl", o["all_reduce"] = "native";
    const std::vector<double> many = losses_of(o);
    for (size_t step = 0; step < alone.size(); ++step) EXPECT_NEAR(many.at(step), alone[step], 1e-11 * alone[step]);
  }
}

}  // namespace
}  // namespace tessera
