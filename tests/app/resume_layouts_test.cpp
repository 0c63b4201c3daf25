// Checkpoints know no layout: a run that was saved under one plan and resumed under another goes on to the bits of a
// run that nobody interrupted, as long as both plans add the same micro-batches in the same order. The files are
// compared, not what the program says of itself.

#include "tests/app/layouts.h"
#include "tests/app/program.h"

namespace tessera {
namespace {
namespace fs = std::filesystem;

using test::kFourInARow;
using test::kLayouts;
using test::kOnePart;
using test::kPipelines;
using test::kTwoPairs;
using test::kTwoParts;
using test::Plans;

class ResumeLayoutsTest : public test::ProgramTest {
 protected:
  std::string both_files(const std::string& run) const {
    const std::string last = run + "/checkpoints/step-12";
    return weights(last) + optimizer(last);
  }
  // The files that 12 steps of `settings` end with under `plan`; step 8 is saved too.
  std::string ended(const std::string& settings, const std::string& plan, const std::string& out) const {
    const test::Ran r =
        train(fmt::format("--save-every 8 --eval-every 0 --dropout 0.1 {} {} --out {}", settings, plan, out));
    EXPECT_EQ(r.status, 0) << plan << ": " << r.err;
    return both_files(out);
  }
  // The files that run `out` ends with when it goes on after step 8 under another plan.
  std::string resumed(const std::string& out, const std::string& plan) const {
    fs::remove_all(path(out + "/checkpoints/step-12"));
    const test::Ran r = run(fmt::format("train --resume --out {} {}{}", out, test::kNoPlan, plan));
    EXPECT_EQ(r.status, 0) << plan << ": " << r.err;
    EXPECT_NE(r.err.find("going on after step 8\n"), std::string::npos) << r.err;
    return both_files(out);
  }
  // Each plan ends like the first, and is picked up by the one after it and by another.
  void expect_one_run(const std::string& settings, const Plans& plans) const {
    const std::string whole = ended(settings, plans[0], "whole");
    for (size_t p = 0; p < plans.size(); ++p) {
      ASSERT_TRUE(ended(settings, plans[p], "run") == whole) << settings << ": " << plans[p];
      for (const size_t away : {1, 3}) {
        const std::string& other = plans[(p + away) % plans.size()];
        ASSERT_TRUE(resumed("run", other) == whole) << settings << ": from " << plans[p] << " to " << other;
      }
      fs::remove_all(path("run"));
    }
    fs::remove_all(path("whole"));
  }
};

TEST_F(ResumeLayoutsTest, TwoPartsOfABatch) { expect_one_run("", kTwoParts); }
TEST_F(ResumeLayoutsTest, TwoPartsOfABatchInBfloat16) { expect_one_run("--dtype bf16", kTwoParts); }
TEST_F(ResumeLayoutsTest, FourPartsInARow) { expect_one_run("--dtype bf16", kFourInARow); }
TEST_F(ResumeLayoutsTest, TwoPairs) { expect_one_run("", kTwoPairs); }

// Four layers and heads, so that they can be cut.
const std::string kFour = "--layers 4 --heads 4 ";
TEST_F(ResumeLayoutsTest, OnePart) { expect_one_run(kFour, kOnePart); }
TEST_F(ResumeLayoutsTest, Pipelines) { expect_one_run(kFour, kPipelines); }
TEST_F(ResumeLayoutsTest, PipelinesInBfloat16) { expect_one_run(kFour + "--dtype bf16", kPipelines); }

// The same through parts of every kind.
TEST_F(ResumeLayoutsTest, AnyLayoutSavesWhatItHasRead) {
  for (const char* settings : {"--dtype bf16", "--optimizer sgd --lr 0.1 --momentum 0.9"}) {
    const std::string whole = ended(kFour + settings, "--ranks 1", "run");
    for (const std::string& plan : kLayouts) {
      const test::Ran r = run("train --resume --out run " + test::kNoPlan + plan);
      ASSERT_EQ(r.status, 0) << plan << ": " << r.err;
      ASSERT_TRUE(both_files("run") == whole) << settings << ": " << plan;
    }
    fs::remove_all(path("run"));
  }
}

// Nothing is trained, and all of it is saved again.
TEST_F(ResumeLayoutsTest, AFinishedRunIsSavedAgainAsItWas) {
  for (const char* settings : {"--dtype bf16", "--dtype bf16 --optimizer sgd --lr 0.1 --momentum 0.9", ""}) {
    const std::string whole = ended(settings, kTwoParts[0], "run");
    for (const std::string& plan : kTwoParts) {
      const test::Ran r = run("train --resume --out run " + test::kNoPlan + plan);
      ASSERT_EQ(r.status, 0) << plan << ": " << r.err;
      ASSERT_TRUE(both_files("run") == whole) << settings << ": " << plan;
    }
    fs::remove_all(path("run"));
  }
}

// SGD hides no wrong scale, as Adam does.
TEST_F(ResumeLayoutsTest, SgdWithMicrobatchesWritesTheFilesOfRanks) {
  const std::string sgd = "--optimizer sgd --lr 0.1 --momentum ";
  for (const char* momentum : {"0", "0.9"}) {
    const std::string settings = sgd + momentum;
    const std::string two = ended(settings, "--ranks 1 --microbatches 2", "a"),
                      four = ended(settings, "--ranks 4", "b"),
                      pairs = ended(settings, "--ranks 2 --microbatches 2", "c");
    EXPECT_TRUE(ended(settings, "--dp 2", "d") == two);
    EXPECT_TRUE(ended(settings, "--ranks 1 --microbatches 4", "e") == four);
    EXPECT_TRUE(ended(settings, "--dp 4 --all-reduce tree", "f") == pairs);
    EXPECT_FALSE(four == pairs) << "the order of sums shows in the bits, or this test would see nothing";
    for (const char* name : {"a", "b", "c", "d", "e", "f"}) fs::remove_all(path(name));
  }
}

TEST_F(ResumeLayoutsTest, SgdRunsArePickedUpToo) {
  expect_one_run("--optimizer sgd --lr 0.1 --momentum 0.9 --dtype bf16",
                 {"--ranks 2 --zero 3", "--ranks 1 --microbatches 2", "--ranks 2 --dp-mode ps-sync", "--ranks 2"});
}

}  // namespace
}  // namespace tessera
