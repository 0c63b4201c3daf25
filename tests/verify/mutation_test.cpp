// The contract is able to fail: each planted defect turns it red, under every strategy that it can be planted in.
#include <gtest/gtest.h>

#include "tests/verify/plans.h"
#include "verify/defects/defects.h"

namespace tessera {
namespace {

using test::command_of;
using test::small_plan;

// True when the contract turns red, or training itself stops.
bool is_caught(const TrainOptions& o, std::string_view name) {
  const Job job = job_of(o);
  check_applies(defect(name), job);
  return !verify(job, planted(defect(name), job)).passed();
}

void expect_caught(std::string_view mutation, TrainOptions o) {
  o["steps"] = 3;
  say(o, "ranks=3 microbatches=2 batch=12 clip=0.1 timeout=5");
  ASSERT_TRUE(verify(job_of(o)).passed()) << command_of(o);
  EXPECT_TRUE(is_caught(o, mutation)) << mutation << ": " << command_of(o);
}

// DDP and the stages of ZeRO, with both kinds of optimizer.
void expect_caught_by_all(std::string_view mutation) {
  for (const char* optimizer : {"sgd", "adamw"})
    for (int64_t zero = 0; zero <= 3; ++zero) {
      TrainOptions o = small_plan();
      o["optimizer"] = optimizer;
      o["zero"] = zero;
      expect_caught(mutation, o);
    }
}

TEST(Mutation, ADroppedReductionIsCaught) { expect_caught_by_all("missing-gradient-sum"); }
TEST(Mutation, ASecondDivisionIsCaught) { expect_caught_by_all("gradients-divided-twice"); }
TEST(Mutation, ASkippedMicrobatchIsCaught) { expect_caught_by_all("skipped-microbatch"); }
TEST(Mutation, ShiftedSequencesAreCaught) { expect_caught_by_all("shifted-sequences"); }
TEST(Mutation, AStaleShardIsCaught) { expect_caught_by_all("stale-part"); }
TEST(Mutation, AnotherOrderOfSummationIsCaught) { expect_caught_by_all("ring-order"); }
TEST(Mutation, ARankThatDoesNotClipIsCaught) { expect_caught_by_all("unclipped-rank"); }

TEST(Mutation, OtherStrategiesCatchThemToo) {
  for (const char* mode : {"dataparallel", "ps-sync"}) {
    TrainOptions o = small_plan();
    o["dp_mode"] = mode;
    for (const char* mutation : {"gradients-divided-twice", "skipped-microbatch", "shifted-sequences"})
      expect_caught(mutation, o);
  }
}

// The model-parallel family, on the smallest mesh that has the axis.
void expect_caught_on(std::string_view mutation, std::string_view words) {
  for (const char* optimizer : {"sgd", "adamw"})
    for (const char* dtype : {"fp64", "fp32"}) {
      TrainOptions o = small_plan();
      o["optimizer"] = optimizer;
      o["dtype"] = dtype;
      say(o, "steps=3 microbatches=2 batch=8 clip=0.1 timeout=5");
      say(o, words);
      ASSERT_TRUE(verify(job_of(o)).passed()) << command_of(o);
      EXPECT_TRUE(is_caught(o, mutation)) << mutation << ": " << command_of(o);
    }
}

TEST(Mutation, AnInputGradientThatIsNotSummedIsCaught) { expect_caught_on("missing-input-gradient-sum", "tp=2"); }
TEST(Mutation, ANormGradientThatIsNotSummedIsCaught) { expect_caught_on("unsummed-norm-weight", "tp=2 sp=true"); }
TEST(Mutation, AWrongMaskAcrossContextRanksIsCaught) { expect_caught_on("wrong-causal-mask", "cp=2"); }
TEST(Mutation, AHeadNormThatIsNotSummedIsCaught) {
  expect_caught_on("unsummed-head-norm", "family=llama qk_norm=true tp=2");
}
TEST(Mutation, PositionsOfAnotherChunkAreCaught) { expect_caught_on("wrong-positions", "family=llama cp=2"); }
TEST(Mutation, DocumentsOfAnotherSequenceAreCaught) {
  for (const char* words : {"document_mask=true vocab=12 cp=2", "document_mask=true vocab=12 pp=2"})
    expect_caught_on("wrong-documents", words);
}
TEST(Mutation, TargetsOfAnotherMicrobatchAreCaught) { expect_caught_on("other-targets", "pp=2"); }
TEST(Mutation, CopiesOfATiedWeightThatAreNotSummedAreCaught) { expect_caught_on("untied-copies", "pp=2"); }
TEST(Mutation, DefectsOfTheDataFamilyAreCaughtInProducts) {
  for (const char* mutation : {"missing-gradient-sum", "gradients-divided-twice", "skipped-microbatch",
                               "shifted-sequences", "stale-part", "unclipped-rank"})
    expect_caught_on(mutation, "pp=2 dp=2 tp=2");
}

// A wrong byte, call, buffer or loss alone, with every bit of the training right.
TEST(Mutation, CountsAreBoundsOfTheirOwn) {
  TrainOptions o = small_plan();
  say(o, "ranks=2 zero=2 steps=40");
  const VerifyResult good = verify(job_of(o));
  ASSERT_TRUE(good.passed()) << good.failures.front();
  const auto expect_red = [&](const std::function<void(VerifyResult&)>& spoil) {
    VerifyResult bad = good;
    spoil(bad);
    check_totals(bad, job_of(o).plan);
    EXPECT_FALSE(bad.passed());
  };
  expect_red([](VerifyResult& r) { r.sent.back().bytes += 1; });
  expect_red([](VerifyResult& r) { r.sent.back().calls -= 1; });
  expect_red([](VerifyResult& r) { r.sent.pop_back(); });
  expect_red([](VerifyResult& r) { r.sent.push_back({"dp", "broadcast", 2, 8}); });
  expect_red([](VerifyResult& r) { r.held.back().gradients += 4; });
  expect_red([](VerifyResult& r) { r.held.front().optimizer /= 2; });
  expect_red([](VerifyResult& r) { r.peak.back() = 2 * r.expected_peak.back() + (1 << 20); });
  expect_red([](VerifyResult& r) { std::reverse(r.losses.begin(), r.losses.end()); });
  expect_red([](VerifyResult& r) { r.losses.back() = std::nan(""); });
}

}  // namespace
}  // namespace tessera
