// Plans with experts: how routers share out tokens, what is refused, and what a token costs.

#include <numeric>

#include "tests/support/errors.h"
#include "train/memory.h"
#include "train/trainer.h"
#include "train/usage.h"

namespace tessera {
namespace {

Job small_job() {
  Job job{.model = {.layers = 3, .heads = 2, .channels = 8, .context = 10, .vocab = 30},
          .optim = {.steps = 2, .batch = 8},
          .plan = {.threads_per_rank = 1, .timeout = 20}};
  job.model.experts = {.count = 4, .per_token = 2};
  return job;
}

ExpertLoad load_of(const Job& job) {
  ExpertLoad out;
  launch(launch_options(job.plan), [&](Communicator& world) {
    Trainer trainer(job, counted_sequences(job.model.vocab, job.model.context, job.optim.batch, 1), world);
    for (int i = 0; i < 2; ++i) trainer.step();
    const ExpertLoad found = expert_load(trainer);
    if (world.rank() == 0) out = found;
    EXPECT_EQ(expert_load(trainer).busiest().times, 0);  // it was asked
  });
  return out;
}

TEST(TrainedExperts, LoadIsThatOfAllRanks) {
  Job job = small_job();
  const ExpertLoad one = load_of(job);
  ASSERT_EQ(one.rows.size(), 3U);
  for (const std::vector<int64_t>& layer : one.rows)
    EXPECT_EQ(std::accumulate(layer.begin(), layer.end(), int64_t{0}), 2 * 8 * 10 * 2);
  EXPECT_EQ(one.dropped, 0);
  job.plan.dp = 4, job.plan.ep = 2, job.plan.pp = 3;
  EXPECT_EQ(load_of(job).rows, one.rows);
  job.plan = {.dp = 2, .ep = 2, .microbatches = 2, .recompute = Recompute::block, .threads_per_rank = 1, .timeout = 20};
  job.model.recompute = Recompute::block;
  EXPECT_EQ(load_of(job).rows, one.rows);
  job.model.recompute = Recompute::none;
  job.plan = {.dp = 2, .tp = 2, .ep = 2, .sp = true, .threads_per_rank = 1, .timeout = 20};
  EXPECT_EQ(load_of(job).rows, one.rows);  // in fp32 these tokens are not near enough to any border
  job.plan = {.dp = 2, .ep = 2, .microbatches = 2, .threads_per_rank = 1, .timeout = 20};
  job.model.experts.capacity = 0.5;
  const ExpertLoad dropped = load_of(job);
  EXPECT_GT(dropped.dropped, 0);
  int64_t all = dropped.dropped;
  for (const std::vector<int64_t>& layer : dropped.rows) all += std::accumulate(layer.begin(), layer.end(), int64_t{0});
  EXPECT_EQ(all, 3 * 2 * 8 * 10 * 2);
}

// Ranks of cp have parts of the sequences, whose first tokens find a place.
TEST(TrainedExperts, ACapacityIsOneOfWholeSequences) {
  Job job = small_job();
  job.model.context = 12;
  job.model.experts.capacity = 0.6;
  const ExpertLoad one = load_of(job);
  EXPECT_GT(one.dropped, 0);
  for (const ContextMode mode : {ContextMode::ring, ContextMode::ulysses}) {
    job.plan = {.dp = 2, .cp = 2, .ep = 4, .cp_mode = mode, .threads_per_rank = 1, .timeout = 20};
    const ExpertLoad many = load_of(job);
    EXPECT_EQ(many.rows, one.rows);
    EXPECT_EQ(many.dropped, one.dropped);
  }
}

TEST(TrainedExperts, TheBusiestIsSoManyTimesTooBusy) {
  const ExpertLoad load{.rows = {{2, 2, 2, 2}, {1, 6, 1, 0}}};
  EXPECT_EQ(load.busiest().times, 3);
  EXPECT_EQ(load.busiest().layer, 1);
  EXPECT_EQ(load.busiest().expert, 1);
}

TEST(TrainedExperts, WhatIsNotBuiltIsRefusedByName) {
  const auto field = [](const auto& change) -> std::string {
    Job job = small_job();
    change(job);
    return error_of([&] { check(job); });
  };
  EXPECT_EQ(field([](Job& j) { j.plan.dp = 4, j.plan.ep = 2; }), "nothing was thrown");
  EXPECT_TRUE(field([](Job& j) { j.plan.dp = 4, j.plan.ep = 3; }).starts_with("`ep`"));
  EXPECT_TRUE(field([](Job& j) { j.plan.dp = 8, j.plan.ep = 8; }).starts_with("`ep`"));
  EXPECT_TRUE(field([](Job& j) { j.model.experts.count = 0, j.plan.dp = 2, j.plan.ep = 2; }).starts_with("`ep`"));
  EXPECT_EQ(field([](Job& j) { j.plan.tp = 2, j.plan.cp = 1, j.plan.dp = 2, j.plan.ep = 2; }), "nothing was thrown");
  EXPECT_EQ(field([](Job& j) { j.model.context = 12, j.plan.cp = 2, j.plan.dp = 2, j.plan.ep = 4; }),
            "nothing was thrown");
  EXPECT_TRUE(
      field([](Job& j) { j.plan.dp = 2, j.plan.ep = 2, j.plan.dp_mode = DataMode::ps_sync; }).starts_with("`ep`"));
  EXPECT_TRUE(field([](Job& j) {
                j.plan.dp = 2, j.plan.ep = 2, j.plan.all_reduce = Algorithm::ring;
              }).starts_with("`all_reduce`"));
  const auto groups = [&](int64_t ep, int64_t ranks) {
    return field([=](Job& j) {
      j.optim.batch = 8, j.model.experts.count = 8;
      j.plan = {.dp = 8, .ep = ep, .zero = ZeroStage::two, .shard_ranks = ranks, .threads_per_rank = 1, .timeout = 20};
    });
  };
  EXPECT_EQ(groups(2, 4), "nothing was thrown");
  EXPECT_EQ(
      groups(4, 2),
      "`shard_ranks`: each group has all experts, which 4 ranks of `ep` share out; expected a multiple of 4, found 2");
  EXPECT_EQ(field([](Job& j) { j.plan.dp = 2, j.plan.ep = 2, j.optim.optimizer = OptimizerKind::muon; }),
            "nothing was thrown");
  EXPECT_TRUE(field([](Job& j) { j.model.experts.per_token = 5; }).starts_with("`experts_per_token`"));
  EXPECT_EQ(field([](Job& j) { j.model.lora = {.rank = 2, .targets = {"c_attn"}}; }), "nothing was thrown");
  EXPECT_TRUE(
      field([](Job& j) {
        j.model.lora = {.rank = 2, .targets = {"c_fc"}};
      }).starts_with("`lora_targets`: expected some of c_attn, attn.c_proj (experts have no adapters), found 'c_fc'"));
  EXPECT_TRUE(field([](Job& j) { j.model.quantize.codec = Codec::nf4; }).starts_with("`quantize`"));
}

// Experts that a token does not meet are parameters, and no computation.
TEST(TrainedExperts, ATokenMeetsAsManyAsInADenseModel) {
  ModelConfig moe = preset("moe-nano").value(), dense = preset("llama-nano").value();
  moe.vocab = dense.vocab = 81;
  const int64_t routers = moe.layers * moe.channels * moe.experts.count;
  EXPECT_EQ(make_model(moe)->training_flops(), make_model(dense)->training_flops() + 6 * static_cast<double>(routers));
  EXPECT_EQ(make_model(moe)->parameter_count(),
            make_model(dense)->parameter_count() + routers + moe.layers * 6 * 3 * 128 * 192);
}

}  // namespace
}  // namespace tessera
