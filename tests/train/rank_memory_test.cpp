// The memory that ranks will hold, known before they are there: compared with what ranks then held, and for sizes that
// no machine has.
#include <gtest/gtest.h>
#include <sys/resource.h>

#include "train/memory.h"
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
    {.tp = 2, .sp = true, .all_reduce = Algorithm::ring, .microbatches = 2},
    {.cp = 2, .microbatches = 2},
    {.cp = 2, .cp_mode = ContextMode::ulysses},
    {.pp = 2, .schedule = ScheduleKind::gpipe, .microbatches = 6},
    {.pp = 2, .microbatches = 6},
    {.pp = 2, .schedule = ScheduleKind::zb_v, .microbatches = 6},
    {.pp = 2, .dp = 2, .zero = ZeroStage::one, .schedule = ScheduleKind::interleaved, .microbatches = 4},
    {.pp = 2, .dp = 2, .tp = 2, .zero = ZeroStage::three, .microbatches = 2},
    {.pp = 2, .dp = 2, .zero = ZeroStage::three, .schedule = ScheduleKind::gpipe, .microbatches = 3},
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
      const bool summed = plan.pp > 1 && plan.zero == ZeroStage::three;  // sums peaks that need not come together
      EXPECT_LT(share, summed ? 1.2 : 1.06) << to_text(plan) << ", rank " << r;
    }
  }
}

// Ranks wait for sums and values of units that another thread brings, and hold the same whenever it comes.
TEST(RankMemory, IsTheSameInEveryRun) {
  Job job = small_job({.pp = 2, .dp = 2, .zero = ZeroStage::three, .schedule = ScheduleKind::gpipe, .microbatches = 3});
  job.model.channels = 32;
  job.model.context = 8;
  const std::vector<RankMemory> expected = memory_of_ranks(job);
  const std::vector<Peak> first = measured(job);
  for (size_t r = 0; r < first.size(); ++r) EXPECT_LE(first[r].total, expected[r].total()) << "rank " << r;
  for (int again = 0; again < 4; ++again) {
    const std::vector<Peak> found = measured(job);
    for (size_t r = 0; r < found.size(); ++r) EXPECT_EQ(found[r].total, first[r].total) << "rank " << r;
  }
}

// A ffn of 9 is cut in 4 and 5, so that pieces of the last rank's units are padded to 256 more elements.
TEST(RankMemory, OfTheTpRankThatHasMost) {
  Job job = small_job({.dp = 2, .cp = 2, .tp = 2, .sp = true, .zero = ZeroStage::three});
  job.model.kv_heads = 2;
  job.model.channels = 32;
  job.model.ffn = 9;
  job.model.context = 16;
  job.model.vocab = 29;
  job.optim.batch = 4;
  const std::vector<RankMemory> expected = memory_of_ranks(job);
  const std::vector<Peak> found = measured(job);
  EXPECT_LT(found[0].held.parameters, found[1].held.parameters);
  for (size_t r = 0; r < found.size(); ++r) EXPECT_LE(found[r].total, expected[r].total()) << "rank " << r;
}

// The last rank of a ring attends with all its queries at every hop, the first with half of them behind hop 0.
TEST(RankMemory, OfTheCpRankThatHasMost) {
  for (const DType dtype : {DType::float32, DType::bfloat16})
    for (const int64_t cp : {2, 4}) {
      Job job = small_job({.cp = cp});
      job.model.layers = 1;
      job.model.vocab = 29;
      job.optim.batch = 4;
      job.optim.dtype = dtype;
      const std::vector<RankMemory> expected = memory_of_ranks(job);
      const std::vector<Peak> found = measured(job);
      EXPECT_LT(found.front().total, found.back().total);
      for (size_t r = 0; r < found.size(); ++r) EXPECT_LE(found[r].total, expected[r].total()) << "rank " << r;
      EXPECT_EQ(found.back().total, expected.back().total());
    }
}

// Elements: the table 200 x 64, positions 64 x 64, in each of four layers 12 x 64 x 64 of matrices and 13 x 64 besides,
// and the last norm.
TEST(RankMemory, SumsByHand) {
  const int64_t parameters = 200 * 64 + 64 * 64 + 4 * (12 * 64 * 64 + 13 * 64) + 2 * 64;
  const RankMemory one = memory_of_ranks(small_job({})).at(0);
  EXPECT_EQ(one.held, (HeldBytes{4 * parameters, 4 * parameters, 8 * parameters}));
  EXPECT_EQ(one.communication, 0);
  // An activation of 24 sequences; a layer keeps sixteen and the head's logits come on top.
  const int64_t activation = 24 * 64 * 64 * 4, logits = 24 * 64 * 200 * 4;
  EXPECT_GT(one.activations, 4 * 16 * activation + logits);
  EXPECT_LT(one.activations, 4 * 16 * activation + logits + 16 * activation);
  // A server's ranks have the whole beside a shard, which is of whole blocks.
  const std::vector<RankMemory> async =
      memory_of_ranks(small_job({.dp = 2, .dp_mode = DataMode::ps_async, .servers = 1}));
  EXPECT_GE(async[0].held.parameters, 2 * 4 * parameters);
  EXPECT_LT(async[0].held.parameters, 2 * 4 * parameters + 4 * 256 * 8);
  EXPECT_EQ(async[1].held, (HeldBytes{4 * parameters, 4 * parameters, 0}));
}

// Llama 3 8B in bf16 on 64 sequences of 8192 tokens: more than any machine has.
TEST(RankMemory, IsKnownOfWhatNoMachineHas) {
#if defined(__SANITIZE_ADDRESS__)
  GTEST_SKIP() << "the address sanitizer writes an eighth of what is only reserved";
#endif
  Job job = small_job({.dp = 2, .tp = 4, .zero = ZeroStage::one});
  ModelConfig& m = job.model;
  m.family = Family::llama;
  m.layers = m.heads = 32;
  m.kv_heads = 8;
  m.channels = 4096;
  m.ffn = 14336;
  m.context = 8192;
  m.vocab = 128256;
  m.tied = false;
  job.optim.batch = 64;
  job.optim.dtype = DType::bfloat16;
  const auto start = std::chrono::steady_clock::now();
  const std::vector<RankMemory> ranks = memory_of_ranks(job);
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(5));
  EXPECT_GT(ranks.at(0).total(), 300 * kGiB);
  EXPECT_LT(ranks.at(0).total(), 3000 * kGiB);
}

// Models of four and of five equal layers tell what more layers hold, under every plan, with every way to recompute.
TEST(RankMemory, OfManyLayersFollowsFromFew) {
  int trial = 0;
  for (const Plan& plan : kPlans) {
    Job job = small_job(plan);
    job.model.family = ++trial % 2 == 0 ? Family::gpt2 : Family::llama;
    job.model.layers = plan.pp > 1 ? 15 : 8;
    job.plan.recompute = static_cast<Recompute>(trial % 5);
    job.optim.dtype = trial % 3 == 0 ? DType::bfloat16 : DType::float32;
    EXPECT_EQ(memory_of_ranks(job, true), memory_of_ranks(job)) << to_text(job.plan);
  }
}

int64_t most_resident_bytes() {
  rusage used{};
  getrusage(RUSAGE_SELF, &used);
  return int64_t{1024} * used.ru_maxrss;
}

// The sums of a bias' gradient alone are 2 GiB.
TEST(RankMemory, TakesNoMemory) {
#if defined(__SANITIZE_ADDRESS__)
  GTEST_SKIP() << "the address sanitizer writes an eighth of what is only reserved";
#endif
  Job job = small_job({});
  job.model.layers = 1;
  job.model.channels = 4096;
  job.model.context = 4096;
  job.optim.batch = 512;
  const int64_t before = most_resident_bytes();
  EXPECT_GT(memory_of_ranks(job).at(0).total(), 400 * kGiB);
  EXPECT_LT(most_resident_bytes() - before, kGiB);
}

}  // namespace
}  // namespace tessera
