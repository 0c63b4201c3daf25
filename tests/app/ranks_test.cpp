// Several ranks as the user meets them: Ctrl-C, numbers that are none, files that cannot be written, and plans that
// cannot be, each with one line and its status, whatever the strategy.

#include <map>

#include "tests/app/layouts.h"
#include "tests/app/program.h"

namespace tessera {

namespace {
namespace fs = std::filesystem;

class RanksTest : public test::ProgramTest {
 protected:
  void expect_one_line(const std::string& arguments, int status, const std::string& words,
                       const std::string& before = "") const {
    const test::Ran r = run(arguments, before);
    EXPECT_EQ(r.status, status) << arguments << ": " << r.err;
    EXPECT_EQ(std::count(r.err.begin(), r.err.end(), '\n'), 1) << arguments << ": " << r.err;
    EXPECT_TRUE(r.err.starts_with("tessera: ")) << r.err;
    EXPECT_NE(r.err.find(words), std::string::npos) << arguments << ": " << r.err;
  }
};

TEST_F(RanksTest, AnInterruptedRunSavesItsStepAndGoesOnToTheSameBits) {
  const std::string settings = kSmall + "--steps 300 --eval-every 0 --save-every 0 --dropout 0.1 ";
  std::map<int, std::string> ends;
  for (const int ranks : {2, 4}) {
    const std::string out = fmt::format("whole-{}", ranks);
    ASSERT_EQ(run(fmt::format("train {} --ranks {} --out {}", settings, ranks, out)).status, 0);
    ends[ranks] = weights(out + "/checkpoints/step-300") + optimizer(out + "/checkpoints/step-300");
  }
  int signal = SIGINT;
  for (const char* plan : {"--zero 0", "--zero 3", "--dp-mode dataparallel", "--dp-mode ps-sync --servers 2"})
    for (const int ranks : {2, 4}) {
      if (ranks == 2) signal = signal == SIGINT ? SIGTERM : SIGINT;  // each signal meets both numbers of ranks
      const std::string what = fmt::format("--ranks {} {}, signal {}", ranks, plan, signal);
      ASSERT_EQ(interrupted(fmt::format("train {} --ranks {} {} --out run", settings, ranks, plan), signal),
                128 + signal)
          << what << ": " << read_file(path("err.txt"));
      const std::string log = read_file(path("err.txt"));
      const int64_t step = newest_step();
      EXPECT_GT(step, 0) << what;
      EXPECT_NE(log.find(fmt::format("stopped after step {};", step)), std::string::npos) << what << ": " << log;
      EXPECT_TRUE(half_written().empty()) << what;
      ASSERT_EQ(run("train --resume --out run").status, 0) << what;
      EXPECT_TRUE(weights("run/checkpoints/step-300") + optimizer("run/checkpoints/step-300") == ends[ranks]) << what;
      fs::remove_all(path("run"));
    }
}

TEST_F(RanksTest, ALossThatIsNotANumberIsOneLineAndStatus5) {
  const std::string settings = kSmall + "--quiet --lr 1e30 --min-lr 1e30 --warmup 0 --clip 0 --steps 50 ";
  for (const test::Plans& plans : {test::kTwoParts, test::kFourInARow})
    for (const std::string& plan : plans) {
      expect_one_line(fmt::format("train {}{} --out run", settings, plan), 5, "expected finite numbers");
      EXPECT_FALSE(fs::exists(checkpoints()));
      fs::remove_all(path("run"));
    }
}

TEST_F(RanksTest, ACheckpointThatCannotBeWrittenIsOneLineAndStatus6) {
  ASSERT_EQ(train("--out first").status, 0);  // the data is in the cache now
  for (const test::Plans& plans : {test::kTwoParts, test::kFourInARow})
    for (const std::string& plan : plans) {
      expect_one_line(fmt::format("train {} --quiet {} --out run", kSmall, plan), 6, "run/", "ulimit -f 3;");
      EXPECT_TRUE(half_written().empty()) << plan;
      fs::remove_all(path("run"));
    }
}

TEST_F(RanksTest, PlansThatCannotBeAreOneLineAndStatus2) {
  const auto refused = [&](const std::string& plan, const std::string& words) {
    expect_one_line(fmt::format("train {} --batch 12 {} --out run", kSmall, plan), 2, words);
    EXPECT_FALSE(fs::exists(path("run"))) << plan;
  };
  refused("--ranks 5", "--batch: 12 sequences cannot be cut evenly into 5 data ranks x 1 micro-batches");
  refused("--ranks 5", "the nearest that can: 10 or 15");
  refused("--ranks 4 --microbatches 2", "the nearest that can: 8 or 16");
  refused("--ranks 13", "the nearest that can: 13");
  refused("--ranks 0", "--ranks: expected a whole number in [1, 1024], found '0'");
  refused("--zero 4", "--zero: expected a whole number in [0, 3], found '4'");
  refused("--servers 9", "--servers: goes with --dp-mode ps-sync or ps-async, found ddp; expected 1 beside it");
  refused("--dp-mode ps-sync --staleness 2", "--staleness: goes with --dp-mode ps-async, found ps-sync; expected 1");
  refused("--outer-lr 0.5", "--outer-lr: goes with --dp-mode diloco, found ddp; expected 0.7");
  refused("--ranks 4 --dp-mode ps-sync --servers 5", "--servers: expected at most the 4 ranks, found 5");
  refused("--dp 3 --ranks 2", "makes 3 ranks; expected 2; the nearest that can: --dp 2");
  refused("--zero 1 --dp-mode ps-sync", "--zero: 1 goes with --dp-mode ddp, found ps-sync");
  refused("--zero 2 --dp-mode dataparallel", "--zero: 2 goes with --dp-mode ddp, found dataparallel");
  refused("--dp-mode ps-sync --all-reduce ring", "--all-reduce: ps-sync adds at one rank, in rank order");
  refused("--dp-mode ps-asink", "--dp-mode");
}

// Memory and threads that are not there: one line, the right status, and nothing written.

using test::ProgramTest;
using test::Ran;

class Memory : public ProgramTest {
 protected:
  void expect_nothing_written() const { EXPECT_FALSE(std::filesystem::exists(path("run"))); }
};

const std::string kWide =
    "train --data text.txt --channels 256 --heads 4 --layers 4 --context 256 --batch 64 --steps 1 "
    "--threads-per-rank 1 --out run";

TEST_F(Memory, OfAllRanksIsAskedForBeforeTheRun) {
  expect_failure(kWide + " --ranks 4", 2, "4 ranks of this host need", "ulimit -v 1000000;");
  const Ran r = run(kWide + " --ranks 4", "ulimit -v 1000000;");
  EXPECT_NE(r.last_line().find("what would fit: --microbatches"), std::string::npos) << r.err;
  EXPECT_NE(r.err.find("activations"), std::string::npos) << r.err;
  expect_nothing_written();
}

TEST_F(Memory, OfTheOracleIsAskedForToo) {
  expect_failure("verify --channels 256 --heads 4 --layers 4 --context 256 --batch 64 --ranks 2 --steps 1", 2,
                 "2 ranks of this host need", "ulimit -v 500000;");
}

// Four arenas under a limit that once the first of them took half of.
TEST_F(Memory, UnderALimitIsSharedByAllRanks) {
  const Ran r =
      run("train " + kSmall + "--ranks 4 --batch 4 --steps 2 --threads-per-rank 1 --out run", "ulimit -v 3000000;");
  EXPECT_EQ(r.status, 0) << r.err;
}

TEST_F(Memory, OfSizesInACheckpointIsNotTakenAtTheirWord) {
  ASSERT_EQ(train("--steps 2 --out run").status, 0);
  const std::string config = read_file(path("run/config.toml"));
  const size_t at = config.find("layers = ");
  ASSERT_NE(at, std::string::npos);
  std::string huge = config;
  huge.replace(at, config.find('\n', at) - at, "layers = 99999");
  std::ofstream(path("run/config.toml")) << huge;
  expect_failure("train --config run/config.toml --resume --out run", 4, "run/config.toml: describes a model");
  expect_failure("train --config run/config.toml --resume --out run", 4, "model.safetensors");
}

TEST_F(Memory, ThreadsThatCannotBeStartedAreSaid) {
  const std::string limits = "ulimit -s 2000000; ulimit -v 12000000;";  // a stack of 2 GB for each
  expect_failure("train " + kSmall + "--ranks 8 --batch 8 --threads-per-rank 2 --out run", 2,
                 "threads more cannot be started", limits);
  expect_nothing_written();
}

}  // namespace
}  // namespace tessera
