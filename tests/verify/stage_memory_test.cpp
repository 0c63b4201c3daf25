// The bound on what a pipeline's ranks hold: counted by hand, tight where it can be, and broken by a plan that holds
// more.
#include <gtest/gtest.h>

#include "tests/verify/plans.h"
#include "verify/verify.h"

namespace tessera {
namespace {

using Peaks = std::vector<int64_t>;

TEST(StageMemory, PeaksWorkedByHand) {
  const StageMemory m{.kept = 10, .deferred = 7, .forward = 12, .backward = 15, .input = 15, .weight = 9, .packs = 100};
  EXPECT_EQ(peaks_of_ranks(gpipe(2, 3), {m, m}, 1), (Peaks{100 + 20 + 15, 100 + 20 + 15}));
  EXPECT_EQ(peaks_of_ranks(one_f_one_b(2, 3), {m, m}, 1), (Peaks{100 + 10 + 15, 100 + 15}));
  EXPECT_EQ(peaks_of_ranks(naive(2, 3), {m, m}, 1), (Peaks{100 + 15, 100 + 15}));
  // Rank 0: F0 F1 I0 W0 F2 I1 W1 I2 W2. Rank 1: F0 I0 F1 I1 W0 F2 I2 W1 W2: at I1 it holds what W0 needs.
  EXPECT_EQ(peaks_of_ranks(zb_h1(2, 3), {m, m}, 1), (Peaks{100 + 10 + 15, 100 + 7 + 15}));
  // Stages 1 and 2 are neighbours on rank 1, where stage 2's F begins when its input is handed over: of one micro-batch
  // 1F 2F 2I 2W 1I 1W, at 2I 10 of stage 1; at 1I nothing but the gradient that came in, which is in its 15.
  EXPECT_EQ(peaks_of_ranks(zb_v(2, 1), {m, m, m, m}, 1).at(1), 200 + 10 + 15);
  const StageMemory little{.kept = 1, .deferred = 0, .forward = 5, .backward = 5, .input = 5, .weight = 0, .packs = 0};
  const Schedule both = parse_schedule("0F0 0F1 1F0 1B0 1F1 1B1 0B0 0B1\n", "both");
  // Before 1F0 the outputs of 0F0 and 0F1 wait, 3 bytes each; the first is the input among the 5 of 1F0.
  EXPECT_EQ(peaks_of_ranks(both, {little, little}, 3), (Peaks{2 + 3 + 5}));
}

TrainOptions pipeline_plan(const char* schedule) {
  TrainOptions o = test::small_plan();
  say(o, "layers=4 channels=64 context=64 pp=2 microbatches=6 batch=24 steps=3");
  o["schedule"] = schedule;
  return o;
}

TEST(StageMemory, TheBoundIsTight) {
  for (const std::string& name : schedule_names())
    for (const char* recompute : {"none", "block"}) {
      TrainOptions o = pipeline_plan(name.c_str());
      o["recompute"] = recompute;
      const VerifyResult r = verify(job_of(o));
      ASSERT_TRUE(r.passed()) << test::command_of(o) << "\n" << r.failures.front();
      ASSERT_EQ(r.expected_peak.size(), 2U);
      for (size_t rank = 0; rank < 2; ++rank)
        EXPECT_GE(static_cast<double>(r.peak[rank]), 0.9 * static_cast<double>(r.expected_peak[rank]))
            << test::command_of(o) << ", rank " << rank;
    }
}

// GPipe's order breaks the bound of 1F1B.
TEST(StageMemory, AMicrobatchTooManyIsSeen) {
  const TrainOptions o = pipeline_plan("gpipe");
  const VerifyResult r = verify(job_of(o));
  const auto stages = measure_stages(job_of(o), 0);
  const Peaks all = peaks_of_ranks(gpipe(2, 6), stages, handed_bytes(job_of(o))),
              few = peaks_of_ranks(one_f_one_b(2, 6), stages, handed_bytes(job_of(o)));
  for (size_t rank = 0; rank < 2; ++rank)
    EXPECT_GT(r.peak[rank], peak_bound(r.expected_peak[rank] - all[rank] + few[rank])) << rank;
}

}  // namespace
}  // namespace tessera
