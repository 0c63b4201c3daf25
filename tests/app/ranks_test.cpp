// Several ranks: Ctrl-C, non-finite values, unwritable files and invalid plans, each with a one-line error and its
// status, under every strategy.
#include <cstdint>
#include <cstdlib>
#include <functional>
#include <map>
#include <regex>
#include <string>

#include "parallel/comm/launch.h"
#include "tests/app/layouts.h"
#include "tests/app/program.h"

namespace tessera {
namespace {

class RanksTest : public ProgramTest {
 protected:
  void for_each_plan(const std::function<void(const std::string& plan)>& check) const {
    for (const test::Plans& plans : {test::kTwoParts, test::kFourInARow})
      for (const std::string& plan : plans) check(plan), fs::remove_all(path("run"));
  }
};

TEST_F(RanksTest, InterruptedRunMatchesUninterruptedRunBitwise) {
  const std::string settings = kSmall + "--steps 300 --eval-every 0 --save-every 0 --dropout 0.1 ";
  std::map<int, std::string> ends;
  for (const int ranks : {2, 4}) {
    const std::string out = fmt::format("whole-{}", ranks);
    must(fmt::format("train {} --ranks {} --out {}", settings, ranks, out));
    ends[ranks] = files(out + "/checkpoints/step-300");
  }
  int signal = SIGINT;
  for (const char* plan : {"--zero 0", "--zero 3", "--dp-mode dataparallel", "--dp-mode ps-sync --servers 2"})
    for (const int ranks : {2, 4}) {
      if (ranks == 2)
        signal = signal == SIGINT ? SIGTERM : SIGINT;  // both signals are tested with both numbers of ranks
      SCOPED_TRACE(fmt::format("--ranks {} {}, signal {}", ranks, plan, signal));
      ASSERT_EQ(interrupted(fmt::format("train {} --ranks {} {} --out run", settings, ranks, plan), signal),
                128 + signal)
          << log();
      const int64_t step = newest_step();
      EXPECT_GT(step, 0);
      expect_has(log(), fmt::format("stopped after step {};", step));
      EXPECT_TRUE(partial_files().empty());
      must("train --resume --out run");
      EXPECT_TRUE(files("run/checkpoints/step-300") == ends[ranks]);
      fs::remove_all(path("run"));
    }
}

TEST_F(RanksTest, NonFiniteLossReturnsStatus5WithOneLineError) {
  const std::string settings = kSmall + "--quiet --lr 1e30 --min-lr 1e30 --warmup 0 --clip 0 --steps 50 ";
  for_each_plan([&](const std::string& plan) {
    fails_in_one_line(fmt::format("train {}{} --out run", settings, plan), 5, "expected finite values");
    EXPECT_FALSE(fs::exists(checkpoints()));
  });
}

TEST_F(RanksTest, UnwritableCheckpointReturnsStatus6WithOneLineError) {
  train("--out first");  // caches the dataset
  for_each_plan([&](const std::string& plan) {
    fails_in_one_line(fmt::format("train {} --quiet {} --out run", kSmall, plan), 6, "run/", "ulimit -f 3;");
    EXPECT_TRUE(partial_files().empty()) << plan;
  });
}

// Threads and processes write the same file. A resumed run continues counting steps and reports a step that was
// completed before.
TEST_F(RanksTest, ThreadsAndProcessesWriteSameDump) {
  const std::string file = "/dump_3.safetensors", args = "train " + kSmall + "--steps 4 --dump 3 --pp 2 --layers 2 ";
  expect_has(must(args + "--out threads").err, "wrote the dump of step 3");
  const std::string dumped = read_file(path("threads" + file));
  EXPECT_GT(dumped.size(), 80'000U);
  if (kWithMpi && std::system("mpirun --version >/dev/null 2>&1") == 0) {
    must(args + "--out processes", "mpirun --allow-run-as-root --oversubscribe -n 2");
    EXPECT_TRUE(read_file(path("processes" + file)) == dumped);
  }
  must("train " + kSmall + "--steps 2 --pp 2 --layers 2 --out resumed");
  must("train --resume --out resumed --steps 4 --dump 3");
  EXPECT_EQ(read_file(path("resumed" + file)).size(), dumped.size());
  expect_has(must("train --resume --out threads --steps 5 --dump 3").err, "step 3 was already completed");
  must("verify --layers 2 --channels 16 --steps 2 --pp 2 --vocab 40 --dump 2");
  EXPECT_TRUE(fs::exists(path("dump_2.safetensors")));
}

TEST_F(RanksTest, RejectsInvalidDumpWithOneLineError) {
  const auto refused = [&](const std::string& args, const std::string& why) {
    fails_in_one_line("train " + kSmall + "--quiet --out run " + args, 2, why);
    EXPECT_FALSE(fs::exists(path("run"))) << args;
  };
  refused("--ranks 2 --dp-mode diloco --dump 1", "--dump: expected synchronized steps, got --dp-mode");
  refused("--ranks 2 --dp-mode ps-async --dump 1", "got --dp-mode ps-async");
  refused("--dump 13", "--dump: expected one of the 12 --steps, got 13");
  fails_in_one_line("verify --steps 3 --dump 4", 2, "--dump: expected one of the 3 --steps, got 4");
  fails_in_one_line("train " + kSmall + "--quiet --ranks 2 --dump 2 --out run", 6, "run/dump_2.safetensors",
                    "ulimit -f 20;");
  EXPECT_TRUE(partial_files().empty());
  EXPECT_FALSE(fs::exists(path("run/dump_2.safetensors")));
}

TEST_F(RanksTest, InvalidPlansReturnStatus2WithOneLineError) {
  const auto refused = [&](const std::string& plan, const std::string& args) {
    fails_in_one_line(fmt::format("train {} --batch 12 {} --out run", kSmall, plan), 2, args);
    EXPECT_FALSE(fs::exists(path("run"))) << plan;
  };
  refused("--ranks 5", "--batch: 12 is not divisible by 5 data ranks x 1 micro-batches");
  expect_has(log(), "nearest valid value: 10 or 15");
  refused("--ranks 4 --microbatches 2", "nearest valid value: 8 or 16");
  refused("--ranks 13", "nearest valid value: 13");
  refused("--ranks 0", "--ranks: expected an integer in [1, 1024], got '0'");
  refused("--zero 4", "--zero: expected an integer in [0, 3], got '4'");
  refused("--servers 9",
          "--servers: requires --dp-mode ps-sync or ps-async, got ddp; nearest valid value: 1, the default");
  refused("--dp-mode ps-sync --staleness 2",
          "--staleness: requires --dp-mode ps-async, got ps-sync; nearest valid value: 1");
  refused("--outer-lr 0.5", "--outer-lr: requires --dp-mode diloco, got ddp; nearest valid value: 0.7");
  refused("--ranks 4 --dp-mode ps-sync --servers 5", "--servers: expected at most the number of ranks, 4, got 5");
  refused("--dp 3 --ranks 2", "is 3 ranks; expected 2; nearest valid value: --dp 2");
  refused("--zero 1 --dp-mode ps-sync", "--zero: 1 requires --dp-mode ddp, got ps-sync");
  refused("--zero 2 --dp-mode dataparallel", "--zero: 2 requires --dp-mode ddp, got dataparallel");
  refused("--dp-mode ps-sync --all-reduce ring", "--all-reduce: ps-sync reduces on one rank, in rank order");
  refused("--dp-mode ps-asink", "--dp-mode");
}

// Insufficient memory or threads: one line, the right status, and no output files.

using Memory = ProgramTest;

const std::string kAccumulate =
    "train --data text.txt --channels 256 --heads 4 --layers 4 --context 256 --batch 64 --steps 1 --threads-per-rank 1 "
    "--out run";

TEST_F(Memory, CheckCoversAllRanksBeforeTraining) {
  fails(kAccumulate + " --ranks 4", 2, "4 ranks on this host need", "ulimit -v 1000000;");
  expect_has(log(), {"nearest configuration that fits: --microbatches", "activations"});
  EXPECT_FALSE(fs::exists(path("run")));
}

TEST_F(Memory, CheckIncludesOracle) {
  fails("verify --channels 256 --heads 4 --layers 4 --context 256 --batch 64 --ranks 2 --steps 1", 2,
        "2 ranks on this host need", "ulimit -v 500000;");
}

// Four arenas under a limit; an early version reserved half of it for the first arena.
TEST_F(Memory, RanksShareAddressSpaceLimit) {
  must("train " + kSmall + "--ranks 4 --batch 4 --steps 2 --threads-per-rank 1 --out run", "ulimit -v 3000000;");
}

TEST_F(Memory, RejectsExcessiveSizesInCheckpoint) {
  train("--steps 2 --out run");
  write("run/config.toml",
        std::regex_replace(read_file(path("run/config.toml")), std::regex("layers = 1"), "layers = 99999"));
  fails("train --config run/config.toml --resume --out run", 4, "run/config.toml: describes a model");
  expect_has(log(), "model.safetensors");
}

TEST_F(Memory, ReportsFailureToStartThreads) {
  const std::string limits = "ulimit -s 2000000; ulimit -v 12000000;";  // a stack of 2 GB per thread
  fails("train " + kSmall + "--ranks 8 --batch 8 --threads-per-rank 2 --out run", 2,
        "; reduce --ranks or --threads-per-rank, or raise the limit", limits);
  EXPECT_FALSE(fs::exists(path("run")));
}

// Checkpoints are independent of the layout: a run saved under one plan and resumed under another is bitwise identical
// to an uninterrupted run if both plans add the same micro-batches in the same order. The test compares files, not
// printed output.

class ResumeLayoutsTest : public ProgramTest {
 protected:
  std::string both_files(const std::string& run) const { return files(run + "/checkpoints/step-12"); }
  // The final files of 12 steps of `settings` under `plan`; step 8 is also saved.
  std::string ended(const std::string& settings, const std::string& plan, const std::string& out = "run") const {
    anew(
        fmt::format("train {}--save-every 8 --eval-every 0 --dropout 0.1 {} {} --out {}", kSmall, settings, plan, out));
    return both_files(out);
  }
  // Every plan has the same result as the first, and is resumed by the next plan and by another.
  void expect_one_run(const std::string& settings, const test::Plans& plans) const {
    const std::string reference = ended(settings, plans[0], "whole");
    for (size_t p = 0; p < plans.size(); ++p) {
      SCOPED_TRACE(settings + ": " + plans[p]);
      ASSERT_TRUE(ended(settings, plans[p]) == reference);
      for (const size_t away : {1, 3})
        expect_same_checkpoint_after_resume("run/checkpoints/step-12", 8,
                                            " " + test::kNoPlan + plans[(p + away) % plans.size()]);
      ASSERT_FALSE(HasFailure());
    }
  }
  // Reading and saving the first plan's final checkpoint under every other plan does not change it.
  void expect_same_after_layouts(const std::string& settings, const std::string& first,
                                 const test::Plans& plans) const {
    const std::string reference = ended(settings, first);
    for (const std::string& plan : plans) {
      must("train --resume --out run " + test::kNoPlan + plan);
      ASSERT_TRUE(both_files("run") == reference) << settings << ": " << plan;
    }
  }
};

TEST_F(ResumeLayoutsTest, TwoBatchShardsMatchOneRun) { expect_one_run("", test::kTwoParts); }
TEST_F(ResumeLayoutsTest, TwoBatchShardsMatchOneRunInBfloat16) { expect_one_run("--dtype bf16", test::kTwoParts); }
TEST_F(ResumeLayoutsTest, FourSequentialBatchShardsMatchOneRun) { expect_one_run("--dtype bf16", test::kFourInARow); }
TEST_F(ResumeLayoutsTest, TwoPairsOfBatchShardsMatchOneRun) { expect_one_run("", test::kTwoPairs); }

// Four layers and heads, so that they can be partitioned.
const std::string kFour = "--layers 4 --heads 4 ";
TEST_F(ResumeLayoutsTest, UnshardedBatchMatchesOneRun) { expect_one_run(kFour, test::kOnePart); }
TEST_F(ResumeLayoutsTest, PipelinesMatchOneRun) { expect_one_run(kFour, test::kPipelines); }
TEST_F(ResumeLayoutsTest, PipelinesMatchOneRunInBfloat16) { expect_one_run(kFour + "--dtype bf16", test::kPipelines); }

// Unchanged after resharding through all kinds of layouts.
TEST_F(ResumeLayoutsTest, ReshardingThroughEveryLayoutPreservesCheckpoint) {
  for (const std::string settings : {"--dtype bf16", "--optimizer sgd --lr 0.1 --momentum 0.9"})
    expect_same_after_layouts(kFour + settings, "--ranks 1", test::kLayouts);
}

// Nothing is trained, but everything is saved again.
TEST_F(ResumeLayoutsTest, ResumedFinishedRunSavesIdenticalCheckpoint) {
  for (const char* settings : {"--dtype bf16", "--dtype bf16 --optimizer sgd --lr 0.1 --momentum 0.9", ""})
    expect_same_after_layouts(settings, test::kTwoParts[0], test::kTwoParts);
}

// SGD exposes wrong gradient scales, unlike Adam.
TEST_F(ResumeLayoutsTest, SgdWithMicrobatchesMatchesDataRanks) {
  const std::string sgd = "--optimizer sgd --lr 0.1 --momentum ";
  for (const char* momentum : {"0", "0.9"}) {
    const std::string settings = sgd + momentum;
    const std::string two = ended(settings, "--ranks 1 --microbatches 2"), four = ended(settings, "--ranks 4"),
                      pairs = ended(settings, "--ranks 2 --microbatches 2");
    EXPECT_TRUE(ended(settings, "--dp 2") == two);
    EXPECT_TRUE(ended(settings, "--ranks 1 --microbatches 4") == four);
    EXPECT_TRUE(ended(settings, "--dp 4 --all-reduce tree") == pairs);
    EXPECT_FALSE(four == pairs) << "the order of sums must affect the bits for this test";
  }
}

TEST_F(ResumeLayoutsTest, SgdMatchesOneRun) {
  expect_one_run("--optimizer sgd --lr 0.1 --momentum 0.9 --dtype bf16",
                 {"--ranks 2 --zero 3", "--ranks 1 --microbatches 2", "--ranks 2 --dp-mode ps-sync", "--ranks 2"});
}

}  // namespace
}  // namespace tessera
