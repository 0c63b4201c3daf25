// Interrupted, killed and resumed asynchronous runs: a replay is bitwise identical to an uninterrupted one; without a
// replay, workers synchronize at a common step, from which any plan can resume.

#include <cstdint>
#include <string>
#include <vector>

#include "parallel/async/push_log.h"
#include "tests/app/layouts.h"
#include "tests/app/program.h"

namespace tessera {

namespace {

class AsyncResumeTest : public ProgramTest {
 protected:
  Json about(const std::string& checkpoint) const { return Json::parse(open_checkpoint(path(checkpoint)).about); }
  PushLog order(const std::string& file) const { return parse_push_log(read_file(path(file)), file); }
  void expect_success(const std::string& arguments, const std::string& args = "") const {
    expect_has(must(arguments).err, args);
  }
  // Interrupts the run in "run" until it completes all `steps`.
  void interrupt_until_done(const std::string& first, const std::string& again, int64_t steps, int kinds) const {
    const std::string end = fmt::format("run/checkpoints/step-{}", steps);
    const std::vector<int> signals = {SIGINT, SIGKILL, SIGTERM};
    int stops = 0;
    for (int k = 0; k < 8; ++k) {
      const bool begun = fs::exists(path("run/config.toml"));
      const int signal = signals[static_cast<size_t>(k % kinds)];
      const int64_t before = newest_step();
      const int status = interrupted(begun ? again : first, signal, recorded() + 300);
      if (status == 0) break;  // the run finished first
      if (begun) {
        expect_has(log(), before > 0 ? fmt::format("resuming after step {}\n", before) : "starting at step");
      }
      if (signal == SIGKILL) continue;
      ++stops;
      ASSERT_EQ(status, 128 + signal) << log();
      expect_has(log(), fmt::format("stopped after step {};", newest_step()));
      EXPECT_GE(newest_step(), before);
      EXPECT_TRUE(partial_files().empty());
    }
    EXPECT_GT(stops, 0);
    expect_success(again);
    EXPECT_TRUE(fs::exists(path(end)));
  }

  const std::string settings_ = kSmall + "--steps 150 --dropout 0.1 --dp-mode ps-async ";
};

TEST_F(AsyncResumeTest, InterruptedReplayMatchesUninterruptedReplayBitwise) {
  for (const char* plan : {"--ranks 4 --servers 2 --staleness 3", "--ranks 2 --staleness 1 --dtype bf16"}) {
    const std::string train = fmt::format("train {} {} --save-every 40 ", settings_, plan);
    expect_success(train + "--record order.txt --out whole");
    const std::string replay = "--replay order.txt --record again.txt";
    interrupt_until_done(train + replay + " --out run", "train --resume --out run " + replay, 150, 3);
    EXPECT_TRUE(files("run/checkpoints/step-150") == files("whole/checkpoints/step-150")) << plan;
    EXPECT_EQ(read_file(path("again.txt")), read_file(path("order.txt")));
    EXPECT_EQ(records("run"), records("whole"));
    for (const char* name : {"run", "whole"}) fs::remove_all(path(name));
  }
}

// The order of an asynchronous run is not known in advance, but it is recorded, and an uninterrupted replay repeats it.
TEST_F(AsyncResumeTest, UninterruptedReplayMatchesInterruptedRun) {
  const std::string train = fmt::format("train {} --ranks 4 --servers 2 --staleness 2 ", settings_);
  interrupt_until_done(train + "--save-every 0 --out run", "train --resume --out run --record order.txt", 150, 1);
  const std::string end = "run/checkpoints/step-150";
  EXPECT_EQ(read_file(path("order.txt")), read_file(path(end + "/pushes.txt")));
  EXPECT_EQ(order("order.txt").servers[1].size(),
            600U);  // the staleness bound holds, otherwise the order would be rejected
  expect_success(train + "--save-every 0 --replay order.txt --out whole");
  EXPECT_TRUE(files(end) == files("whole/checkpoints/step-150"));
  EXPECT_EQ(records("run"), records("whole"));
}

// At a common step any plan can resume; Adam's updates are counted across all of them.
TEST_F(AsyncResumeTest, AnyPlanResumesAsynchronousRuns) {
  const std::string async = "--dp-mode ps-async --staleness 2 ";
  expect_success("train " + kSmall + "--steps 4 --ranks 4 --servers 3 " + async + "--out run");
  EXPECT_EQ(about("run/checkpoints/step-4").at("updates"), 16);
  const auto on = [&](int64_t steps, const std::string& plan, int64_t updates) {
    const int64_t before = newest_step();
    expect_success(fmt::format("train --resume --out run --steps {} {}{}", steps, test::kNoPlan, plan),
                   fmt::format("resuming after step {}\n", before));
    EXPECT_EQ(about(fmt::format("run/checkpoints/step-{}", steps)).at("updates"), updates) << plan;
  };
  on(6, "--ranks 2 --zero 3", 18);
  on(8, "--ranks 2 --servers 2 " + async, 22);
  on(9, "--ranks 4 --servers 1 " + async, 26);
  on(10, "--ranks 1 --microbatches 2", 27);
  on(11, "--ranks 2 --tp 2", 28);
  const std::string end = files("run/checkpoints/step-11");
  for (const std::string& plan : {async + "--ranks 4 --servers 2", std::string("--ranks 2"), async + "--ranks 1"}) {
    on(11, plan, 28);  // no training, only another save
    EXPECT_TRUE(files("run/checkpoints/step-11") == end) << plan;
  }
}

// With one worker nothing is asynchronous, so results are bitwise comparable.
TEST_F(AsyncResumeTest, OneWorkerMatchesOneRankAcrossResumes) {
  expect_success("train " + kSmall + "--dropout 0.1 --ranks 1 --out whole");
  expect_success("train " + kSmall + "--dropout 0.1 --ranks 1 --save-every 4 --out run --dp-mode ps-async");
  EXPECT_TRUE(files("run/checkpoints/step-12") == files("whole/checkpoints/step-12"));
  for (const char* mode : {"ddp", "ps-async"})
    expect_same_checkpoint_after_resume("run/checkpoints/step-12", 8, std::string(" --dp-mode ") + mode);
}

// In the middle of this record worker 0 has completed three steps and worker 1 one, and worker 1 has pulled a version
// that no longer exists.
class UnevenCheckpointTest : public AsyncResumeTest {
 protected:
  UnevenCheckpointTest() {
    record("order.txt", {{0, 0, 0}, {0, 1, 1}, {1, 0, 0}, {0, 2, 3}, {1, 1, 3}, {1, 2, 5}});
    expect_success(train_ + "--replay order.txt --out run");
    uninterrupted_ = files("run/checkpoints/step-3");
    fs::remove_all(path("run/checkpoints/step-3"));
  }
  void record(const std::string& file, const std::vector<Push>& pushes) const {
    write_push_log(path(file), {.workers = 2, .staleness = 1, .steps = 3, .servers = {pushes}});
  }
  const std::string train_ = "train " + kSmall + "--save-every 1 --steps 3 --dp-mode ps-async --ranks 2 --staleness 1 ";
  std::string uninterrupted_;
};

TEST_F(UnevenCheckpointTest, SavesPulledParameters) {
  EXPECT_TRUE(fs::exists(path("run/checkpoints/step-2/pulled.safetensors")));
  expect_success("train --resume --out run --replay order.txt", "resuming after step 2\n");
  EXPECT_TRUE(files("run/checkpoints/step-3") == uninterrupted_);
}

TEST_F(UnevenCheckpointTest, ResumesWithoutReplayWithinStalenessBound) {
  expect_success("train --resume --out run --record on.txt", "resuming after step 2\n");
  const std::vector<Push> pushes = order("on.txt").servers[0];
  EXPECT_EQ(pushes, (std::vector<Push>{{0, 0, 0}, {0, 1, 1}, {1, 0, 0}, {0, 2, 3}, {1, 1, 4}, {1, 2, 5}}));
  EXPECT_FALSE(files("run/checkpoints/step-3") == uninterrupted_);  // worker 1 has pulled again
  expect_success(train_ + "--replay on.txt --out again");
  EXPECT_TRUE(files("run/checkpoints/step-3") == files("again/checkpoints/step-3"));
}

TEST_F(UnevenCheckpointTest, RejectsResumeUnderDifferentPlan) {
  const std::string args =
      "run/checkpoints/step-2 was saved during a replay, with workers at different steps; expected --dp-mode "
      "ps-async with 2 ranks and 1 servers";
  for (const char* plan : {"--ranks 2", "--ranks 1 --dp-mode ps-async", "--ranks 2 --dp-mode ps-async --servers 2"})
    fails(fmt::format("train --resume --out run {}{}", test::kNoPlan, plan), 2, args);
}

TEST_F(UnevenCheckpointTest, RejectsPushOrderOfDifferentRun) {
  record("other.txt", {{1, 0, 0}, {0, 0, 0}, {0, 1, 2}, {1, 1, 2}, {0, 2, 4}, {1, 2, 4}});
  fails("train --resume --out run --replay other.txt", 2, "--replay: other.txt does not match the resumed run");
  // A record in which worker 1 has not pulled at the checkpoint, and one that assumes it has.
  record("begun.txt", {{0, 0, 0}, {0, 1, 1}, {1, 0, 0}, {0, 2, 3}});
  anew(train_ + "--replay begun.txt --out run");
  fails("train --resume --out run --replay order.txt", 2,
        "--replay: in order.txt, worker 1 has pulled parameters that are not in run/checkpoints/step-2");
}

TEST_F(UnevenCheckpointTest, RecordRequiresCompletePushOrder) {
  anew("train " + kSmall + "--steps 2 --ranks 2 --out run");
  fails("train --resume --out run --steps 4 --dp-mode ps-async --record new.txt", 2,
        "--record: 2 steps were run under a different plan; expected 2 ranks and 1 servers");
  fails("train --resume --out run --steps 3 --dp-mode ps-async --staleness 1 --replay order.txt", 2,
        "--replay: order.txt does not match the resumed run");
}

// With a negligible learning rate, the workers' losses combined equal the losses of one rank.

using AsyncRowsTest = ProgramTest;

TEST_F(AsyncRowsTest, LossesMatchOneRank) {
  const auto losses = [&](const std::string& plan) {
    std::vector<double> out;
    const auto ran = train("--dropout 0.3 --lr 1e-30 --no-eval --no-save --format json " + plan);
    for (const Json& record : parse_records(ran.out))
      if (record["event"] == "step") out.push_back(record["loss"]);
    return out;
  };
  const std::vector<double> alone = losses("--ranks 1");
  ASSERT_EQ(alone.size(), 12U);
  for (const std::string ranks : {"2", "4"}) {
    const std::vector<double> found = losses("--dp-mode ps-async --staleness 0 --servers 2 --ranks " + ranks);
    ASSERT_EQ(found.size(), alone.size());
    for (size_t i = 0; i < alone.size(); ++i) EXPECT_NEAR(found[i], alone[i], 2e-6 * alone[i]) << i;
  }
}

}  // namespace
}  // namespace tessera
