// Checks of what ranks hold: numbers that are not finite, and copies that have drifted apart.
#include <gtest/gtest.h>

#include <limits>

#include "train/checkpoint/state.h"

namespace tessera {
namespace {

Job small_job(const Plan& plan) {
  return {.model = {.layers = 2, .heads = 2, .channels = 16, .context = 8, .vocab = 32},
          .optim = {.steps = 2, .batch = 8},
          .plan = plan};
}

// Runs two steps; then rank `rank` spoils one number of what it holds, and the ranks compare.
std::string compared(const Job& job, int rank, const std::string& tensor) {
  try {
    launch(launch_options(job.plan), [&](Communicator& world) {
      Trainer trainer(job, counted_sequences(job.model.vocab, job.model.context, job.optim.batch, 1), world);
      for (int64_t i = 0; i < job.optim.steps; ++i) trainer.step();
      for (const HeldPart& h : held_between_steps(trainer))
        if (world.rank() == rank && h.name == tensor) h.part.data<float>()[0] += 1e-3F;
      const OpCounts before = world.counts();
      check_replicas(trainer);
      EXPECT_EQ(world.counts(), before);
    });
  } catch (const Error& e) {
    EXPECT_EQ(e.status(), Status::communication);
    return e.what();
  }
  return "";
}

TEST(CheckReplicas, EqualCopiesPassUnderEveryAxis) {
  for (const Plan& plan :
       {Plan{.dp = 4}, Plan{.dp = 2, .tp = 2}, Plan{.cp = 2, .zero = ZeroStage::two}, Plan{.pp = 2, .dp = 2},
        Plan{.dp = 2, .zero = ZeroStage::one}, Plan{.dp = 2, .tp = 2, .zero = ZeroStage::three},
        Plan{.dp = 2, .dp_mode = DataMode::dataparallel}, Plan{.dp = 2, .dp_mode = DataMode::ps_sync}}) {
    Plan thin = plan;
    thin.threads_per_rank = 1;
    EXPECT_EQ(compared(small_job(thin), -1, ""), "") << describe(plan);
  }
}

TEST(CheckReplicas, ACopyThatDriftedIsNamedWithItsRank) {
  const Plan three{.dp = 4, .threads_per_rank = 1};
  EXPECT_NE(compared(small_job(three), 2, "blocks.1.mlp.up.weight")
                .find("step 2: copies of blocks.1.mlp.up.weight differ between ranks: rank 2 does not hold what ranks "
                      "0, 1, 3 hold"),
            std::string::npos)
      << compared(small_job(three), 2, "blocks.1.mlp.up.weight");
  const Plan two{.dp = 2, .threads_per_rank = 1};
  for (const std::string name : {"tokens.weight", "norm.bias.m", "blocks.0.mlp.up.bias.v", "blocks.1.mlp.up.bias.v"}) {
    const std::string message = compared(small_job(two), 1, name);  // in the order of ranks, whatever they hold
    EXPECT_NE(message.find(name + " differ between ranks: rank 0 and rank 1"), std::string::npos) << message;
  }
  const Plan tensor{.tp = 2, .threads_per_rank = 1};  // a norm is whole on both
  EXPECT_NE(compared(small_job(tensor), 1, "norm.weight").find("norm.weight differ"), std::string::npos);
  EXPECT_EQ(compared(small_job(tensor), 1, "blocks.0.mlp.up.weight"), "") << "there is one copy of it";
  const Plan ends{.pp = 2, .threads_per_rank = 1};  // a tied weight is on the first stage and on the last
  EXPECT_NE(compared(small_job(ends), 1, "tokens.weight").find("tokens.weight differ"), std::string::npos);
}

TEST(FirstNotFinite, IsFoundAnywhere) {
  const Philox random = Philox::named(1, "finite");
  for (uint64_t trial = 0; trial < 200; ++trial) {
    std::vector<float> x(random.below(3000, 3 * trial) + 1);
    for (size_t i = 0; i < x.size(); ++i)
      x[i] = i % 3 == 0 ? std::numeric_limits<float>::max() : i % 3 == 1 ? -1e-45F : 0.0F;
    EXPECT_EQ(first_not_finite(DType::float32, std::as_bytes(std::span(x))), -1);
    const auto at = static_cast<int64_t>(random.below(x.size(), 3 * trial + 1));
    x[static_cast<size_t>(at)] = random.below(2, 3 * trial + 2) == 0 ? -INFINITY : NAN;
    EXPECT_EQ(first_not_finite(DType::float32, std::as_bytes(std::span(x))), at);
  }
  const std::vector<double> wide = {1.0, -INFINITY};
  EXPECT_EQ(first_not_finite(DType::float64, std::as_bytes(std::span(wide))), 1);
  const std::vector<uint16_t> narrow = {0x7f7f, 0xff80};
  EXPECT_EQ(first_not_finite(DType::bfloat16, std::as_bytes(std::span(narrow))), 1);
}

}  // namespace
}  // namespace tessera
