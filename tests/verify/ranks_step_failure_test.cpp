// Steps of several ranks over NCCL, real or emulated, that cannot end well: they end on all ranks when they end on one.

#include <limits>

#include "tests/support/errors.h"
#include "tests/verify/nccl_plans.h"

namespace tessera {
namespace {

using RanksStepGraphGpu = test::OnGpus;
using test::Bytes;
using test::on_ranks;
using test::over_nccl;
using test::own_bytes_of;

// A number on one rank that is none: all leave the step out and end in it, with equal weights.
TEST_F(RanksStepGraphGpu, AStepThatIsNotFiniteOnOneRankUpdatesNothing) {
  for (const auto& [name, o] : test::nccl_plans()) {
    if (job_of(o).plan.ranks() > gpus) continue;
    for (const int64_t after : {0, 5}) {  // queued, and launched again
      int ended = 0;
      std::mutex counting;
      on_ranks(o, true, [&, &of = name](Trainer& trainer) {
        for (int64_t step = 0; step < after; ++step) trainer.step();
        if (trainer.world().rank() == trainer.world().size() - 1)
          for (const FlatUnit& unit : trainer.strategy().residents())  // stage 3 of ZeRO has its part alone
            if (unit.name == "blocks.0") unit.values.narrow(0, 0, 1).fill(std::numeric_limits<double>::quiet_NaN());
        const Bytes before = own_bytes_of(trainer);
        expect_error(Status::not_finite, {}, [&] { trainer.step(); });
        EXPECT_TRUE(own_bytes_of(trainer) == before) << of << ", rank " << trainer.world().rank();
        EXPECT_EQ(trainer.steps_done(), after);
        EXPECT_EQ(trainer.step_record().replays > 0, after > 0);
        const std::lock_guard lock(counting);
        ++ended;
      });
      EXPECT_EQ(ended, job_of(o).plan.ranks()) << name;
    }
  }
}

// A token that is none, in the last sequence of a step: nobody updates anything, and all end in that step, with the
// cause that those have who were given it.
TEST_F(RanksStepGraphGpu, ATokenOutsideOnOneRankUpdatesNothing) {
  for (const auto& [name, o] : test::nccl_plans()) {
    if (job_of(o).plan.ranks() > gpus) continue;
    constexpr int64_t kAfter = 5;  // launched again
    Sequences sequences = test::sequences_for(o);
    sequences.load = [good = sequences.load, context = o.sizes.context, last = o.optim.batch - 1,
                      vocab = o.sizes.vocab](int64_t step, int64_t first, int64_t count, int32_t* inputs,
                                             int32_t* targets) {
      good(step, first, count, inputs, targets);
      if (step == kAfter && first <= last && last < first + count)
        inputs[(last - first) * context] = static_cast<int32_t>(vocab + 3);
    };
    std::atomic<int> ended = 0;
    std::string cause = "nothing was thrown";
    try {
      on_ranks(o, true, sequences, [&, &of = name](Trainer& trainer) {
        for (int64_t step = 0; step < kAfter; ++step) trainer.step();
        EXPECT_GT(trainer.step_record().replays, 0) << of;
        const Bytes before = own_bytes_of(trainer);
        try {
          trainer.step();
        } catch (const Error&) {
          EXPECT_TRUE(own_bytes_of(trainer) == before) << of << ", rank " << trainer.world().rank();
          EXPECT_EQ(trainer.steps_done(), kAfter) << of << ", rank " << trainer.world().rank();
          ++ended;
          throw;
        }
      });
    } catch (const Error& e) {
      cause = e.what();
    }
    EXPECT_EQ(ended, job_of(o).plan.ranks()) << name;
    EXPECT_NE(cause.find(std::to_string(o.sizes.vocab + 3) + " "), std::string::npos) << name << ": " << cause;
    EXPECT_NE(cause.find("is outside [0, "), std::string::npos) << name << ": " << cause;
  }
}

std::string failure(const TrainOptions& o, const std::function<void(Trainer&)>& f) {
  try {
    on_ranks(o, true, f);
  } catch (const Error& e) {
    EXPECT_EQ(e.status(), Status::communication) << e.what();
    return e.what();
  }
  return "nothing was thrown";
}

// A rank that fails before the meeting, and one that has agreed to a launch and then does not make it.
TEST_F(RanksStepGraphGpu, ARankThatFailsEndsTheOthers) {
  const TrainOptions o = over_nccl(2, "tp=2");
  for (const bool agreed : {false, true}) {
    const std::string what = failure(o, [&](Trainer& trainer) {
      for (int64_t step = 0; step < 5; ++step) trainer.step();
      EXPECT_GT(trainer.step_record().replays, 0);
      if (trainer.world().rank() == 1) {
        if (agreed) StepRanks(trainer.world(), {}).agree(Wish::none, true, true);
        throw CommError("the cause");
      }
      trainer.step();
    });
    EXPECT_EQ(what, "[rank 1] the cause");
  }
  TrainOptions hasty = o;
  hasty["timeout"] = 1;
  const std::string what = failure(hasty, [&](Trainer& trainer) {
    for (int64_t step = 0; step < 5; ++step) trainer.step();
    if (trainer.world().rank() == 0) return void(trainer.step());
    StepRanks(trainer.world(), {}).agree(Wish::none, true, true);
    std::this_thread::sleep_for(std::chrono::milliseconds(1300));
  });
  EXPECT_NE(what.find("step: NCCL did not end it within 1 s"), std::string::npos) << what;
}

std::string reason(int64_t ranks, std::string_view words) {
  TrainOptions o = over_nccl(ranks, words);
  o["cuda_graph"] = "auto";
  std::string why = no_graph_because(job_of(o), o.trace);
  o["cuda_graph"] = "on";
  if (why.empty())
    EXPECT_EQ(no_graph_because(job_of(o), o.trace), "");
  else
    EXPECT_THROW(no_graph_because(job_of(o), o.trace), Error);
  return why;
}

TEST(RanksStepGraph, SaysWhyNot) {
  EXPECT_EQ(reason(2, ""), "");
  EXPECT_EQ(reason(2, "backend=threads"), "the 2 ranks meet on the host within a step");
  EXPECT_EQ(reason(2, "pp=2"), "the 2 ranks of `pp` send each other messages");
  EXPECT_EQ(reason(2, "cp=2"), "the ranks of `cp_mode` ring send each other messages");
  EXPECT_EQ(reason(2, "trace=true"), "`trace` looks at each pass of a step");
  EXPECT_EQ(reason(2, "offload=optimizer"), "`offload` optimizer moves state through the host");
}

}  // namespace
}  // namespace tessera
