// What ranks will hold, known before they are there: beside what ranks then held, and for sizes that no machine has.
#include "train/rank_memory.h"

#include <gtest/gtest.h>

#include <chrono>
#include <mutex>
#include <string>
#include <vector>

#include "parallel/comm/launch.h"
#include "train/trainer.h"

namespace tessera {
namespace {

constexpr int64_t kGiB = int64_t{1} << 30;

Job small_job(const Plan& plan) {
  Job job{.model = {.layers = 4, .heads = 4, .channels = 64, .context = 64, .vocab = 200},
          .optim = {.steps = 2, .batch = 24},
          .plan = plan};
  job.plan.threads_per_rank = 1;
  check(job);
  return job;
}

struct Peak {
  HeldBytes held;
  int64_t total = 0;
};

std::vector<Peak> measured(const Job& job) {
  std::vector<Peak> out(static_cast<size_t>(job.plan.ranks()));
  launch(launch_options(job.plan), [&](Communicator& world) {
    Trainer trainer(job, counted_sequences(job.model.vocab, job.model.context, job.optim.batch, 1), world);
    for (int64_t i = 0; i < job.optim.steps; ++i) trainer.step();
    const auto live = [&](Category c) { return trainer.arena()->usage(c).live; };
    out[static_cast<size_t>(world.rank())] = {
        {live(Category::parameters), live(Category::gradients), live(Category::optimizer)},
        trainer.arena()->total().peak};
  });
  return out;
}

const Plan kPlans[] = {
    {},
    {.microbatches = 4},
    {.recompute = Recompute::block},
    {.dp = 2, .microbatches = 3},
    {.dp = 2, .zero = ZeroStage::one},
    {.dp = 4, .zero = ZeroStage::two, .microbatches = 2},
    {.dp = 2, .zero = ZeroStage::three, .microbatches = 2},
    {.dp = 3, .dp_mode = DataMode::dataparallel, .microbatches = 2},
    {.dp = 3, .dp_mode = DataMode::ps_sync, .servers = 2},
    {.tp = 2, .sp = true, .microbatches = 2},
    {.cp = 2, .microbatches = 2},
    {.cp = 2, .cp_mode = ContextMode::ulysses},
    {.pp = 2, .schedule = ScheduleKind::gpipe, .microbatches = 6},
    {.pp = 2, .microbatches = 6},
    {.pp = 2, .schedule = ScheduleKind::zb_v, .microbatches = 6},
    {.pp = 2, .dp = 2, .zero = ZeroStage::one, .schedule = ScheduleKind::interleaved, .microbatches = 4},
    {.pp = 2, .dp = 2, .tp = 2, .zero = ZeroStage::three, .microbatches = 2},
};

TEST(RankMemory, IsWhatRanksThenHold) {
  for (const Plan& plan : kPlans) {
    const Job job = small_job(plan);
    const std::vector<RankMemory> expected = memory_of_ranks(job);
    const std::vector<Peak> found = measured(job);
    ASSERT_EQ(expected.size(), found.size());
    for (size_t r = 0; r < found.size(); ++r) {
      EXPECT_EQ(expected[r].held, found[r].held) << to_text(plan) << ", rank " << r;
      const double share = static_cast<double>(expected[r].total()) / static_cast<double>(found[r].total);
      EXPECT_GT(share, 0.97) << to_text(plan) << ", rank " << r;
      EXPECT_LT(share, 1.06) << to_text(plan) << ", rank " << r;
    }
  }
}

}  // namespace
}  // namespace tessera
