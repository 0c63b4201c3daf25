// Steps of several ranks over NCCL, real or emulated: captured and launched again they leave the bits and the counts of
// those that are queued, and they train like one rank.

#include <tuple>

#include "tests/verify/nccl_plans.h"

namespace tessera {
namespace {

using RanksStepGraphGpu = test::OnGpus;
using test::Bytes;
using test::bytes_of;
using test::on_ranks;
using test::over_nccl;

struct OneRank {
  std::vector<double> losses, norms;
  Bytes end;
  std::vector<OpCounts> counts;
  bool operator==(const OneRank&) const = default;
};
struct Ran {
  std::vector<OneRank> ranks;
  int64_t replays = 0;
};

Ran run(const TrainOptions& o, bool captured, const std::function<void(Trainer&, int64_t step)>& between = {}) {
  Ran ran;
  ran.ranks.resize(static_cast<size_t>(job_of(o).plan.ranks()));
  on_ranks(o, captured, [&](Trainer& trainer) {
    OneRank& own = ran.ranks[static_cast<size_t>(trainer.world().rank())];
    for (int64_t step = 0; step < o.optim.steps; ++step) {
      if (between) between(trainer, step);
      const StepReport report = trainer.step();
      own.losses.push_back(report.loss);
      own.norms.push_back(report.grad_norm);
    }
    for (Communicator* c : trainer.communicators()) own.counts.push_back(c->counts());
    own.end = bytes_of(trainer, trainer.strategy().residents());
    if (trainer.world().rank() == 0) ran.replays = trainer.step_record().replays;
    EXPECT_EQ(trainer.steps_done(), o.optim.steps);
  });
  return ran;
}

TEST_F(RanksStepGraphGpu, ReplaysHaveTheBitsAndCountsOfQueuedSteps) {
  for (const auto& [name, o] : test::nccl_plans()) {
    if (job_of(o).plan.ranks() > gpus) continue;
    const Ran captured = run(o, true), queued = run(o, false);
    for (size_t r = 0; r < captured.ranks.size(); ++r) {
      const OneRank &a = captured.ranks[r], &b = queued.ranks[r];
      EXPECT_EQ(a.losses, b.losses) << name << ", rank " << r;
      EXPECT_EQ(a.norms, b.norms) << name << ", rank " << r;
      EXPECT_TRUE(a.end == b.end) << name << ", rank " << r;
      EXPECT_TRUE(a.counts == b.counts) << name << ", rank " << r;
      EXPECT_EQ(a.losses, captured.ranks[0].losses) << name;
      EXPECT_EQ(a.norms, captured.ranks[0].norms) << name;
    }
    EXPECT_GE(captured.replays, o.optim.steps - 4) << name;  // the arena may grow in three steps, and one is captured
    EXPECT_EQ(queued.replays, 0) << name;
    const std::vector<double>& norms = queued.ranks[0].norms;
    EXPECT_GT(*std::max_element(norms.begin(), norms.end()), o.optim.clip) << name;  // some steps are clipped
  }
}

// In float64, where the order of sums shows in the last digits alone.
void expect_like_one(const std::string& name, TrainOptions o, bool captured) {
  if (!test::has_kernels(DType::float64, Device::cuda)) return;
  o["dtype"] = "fp64";
  o["grad_dtype"] = "fp32";  // which is not asked of float64
  o["steps"] = 5;
  TrainOptions one = o;
  one.ranks = 1;
  forget(one, {"tp", "cp", "pp"});
  say(one, "sp=false zero=0");
  const OneRank many = run(o, captured).ranks[0], alone = run(one, true).ranks[0];
  for (size_t step = 0; step < many.losses.size(); ++step) {
    EXPECT_NEAR(many.losses[step], alone.losses[step], 1e-11 * alone.losses[step]) << name;
    EXPECT_NEAR(many.norms[step], alone.norms[step], 1e-9 * alone.norms[step]) << name;
  }
}

TEST_F(RanksStepGraphGpu, RanksTrainLikeOne) {
  for (const auto& [name, plan] : test::nccl_plans())
    if (job_of(plan).plan.ranks() <= gpus) expect_like_one(name, plan, true);
}

// Owners of matrices get what shards have of them, and those of a pipeline its activations: no step is captured.
TEST_F(RanksStepGraphGpu, RanksThatSendMessagesTrainLikeOne) {
  for (const auto& [ranks, zero, tp, pp] : {std::tuple{2, 1, 1, 1}, {3, 2, 1, 1}, {4, 3, 2, 1}, {4, 1, 1, 2}}) {
    if (ranks > gpus) continue;
    TrainOptions o = over_nccl(ranks, "optimizer=muon");
    o["zero"] = zero, o["tp"] = tp, o["pp"] = pp;
    if (ranks == 3) o["batch"] = 6;
    expect_like_one("muon, zero " + std::to_string(zero), o, false);
  }
}

// One rank's arena has another layout: all queue that step, and capture and launch again together.
TEST_F(RanksStepGraphGpu, RanksAgreeOnHowTheyMakeAStep) {
  const TrainOptions o = over_nccl(2, "steps=14");
  const Ran usual = run(o, true);
  std::vector<std::vector<Tensor>> kept(2);
  std::vector<int64_t> replays;
  const Ran disturbed = run(o, true, [&](Trainer& trainer, int64_t step) {
    const int rank = trainer.world().rank();
    if (rank == 0) replays.push_back(trainer.step_record().replays);
    if (rank == 1 && step == 5)
      kept[1].push_back(Tensor::empty({1000}, DType::float32, trainer.arena()));            // among what the graph uses
    if (rank == 0 && step == 9) Tensor::empty({1 << 20}, DType::float32, trainer.arena());  // the arena grows
    if (step == 13) kept[1].clear();
  });
  for (size_t r = 0; r < 2; ++r) EXPECT_TRUE(disturbed.ranks[r] == usual.ranks[r]);
  EXPECT_LT(disturbed.replays, usual.replays);
  EXPECT_GE(disturbed.replays, 6);
  EXPECT_EQ(replays[6], replays[5]);  // the fifth was queued on rank 0 too
}

TEST_F(RanksStepGraphGpu, AStepWaitsOnce) {
  if constexpr (kWithCuda)
    for (const auto& [name, o] : test::nccl_plans()) {
      if (job_of(o).plan.ranks() > gpus) continue;
      on_ranks(o, true, [&, &of = name](Trainer& trainer) {
        for (int64_t step = 0; step < 6; ++step) {
          const int64_t before = cuda::synchronizations(*trainer.arena());
          trainer.step();
          const int64_t waits = cuda::synchronizations(*trainer.arena()) - before;
          if (step < 2) continue;
          EXPECT_EQ(waits, 1) << of << " " << step;
        }
      });
    }
}

TEST_F(RanksStepGraphGpu, AWishIsHeardByAll) {
  const TrainOptions o = over_nccl(2, "");
  for (const Wish wish : {Wish::save, Wish::stop})
    on_ranks(o, true, [&](Trainer& trainer) {
      for (int64_t step = 0; step < 6; ++step)
        EXPECT_EQ(trainer.step(step == 4 || (step == 5 && trainer.world().rank() == 1) ? wish : Wish::none).wish,
                  step >= 4 ? wish : Wish::none);
    });
}

}  // namespace
}  // namespace tessera
