// Automatic restarts: a killed run is bitwise identical to an uninterrupted one, permanent failures are not retried,
// fewer hosts reduce the number of data ranks, and a signal to the launcher ends everything.
#include "app/train/restarts.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <functional>
#include <map>
#include <string>
#include <system_error>
#include <vector>

#include "data/safetensors.h"
#include "tests/app/program.h"
#include "tests/parallel/tcp.h"
#include "tests/support/errors.h"

namespace tessera {
namespace {
using Args = std::vector<std::string>;

TEST(Restarts, ChildProcessReceivesRemainingArguments) {
  const Args args = {"train",      "--restarts", "3",      "--dp=2", "--launch=mpirun -n {ranks}",
                     "--hostfile", "hosts",      "--quiet"};
  EXPECT_EQ(start_args(args, {"--resume"}), (Args{"train", "--dp=2", "--quiet", "--resume"}));
}

TEST(Restarts, DataAxisShrinksToAvailableSlotsAtConstantBatchSize) {
  const auto on = [](const Plan& plan, int64_t slots) {
    const Plan found = plan_on(plan, slots);
    EXPECT_EQ(found.dp * found.microbatches, plan.dp * plan.microbatches);
    EXPECT_LE(found.ranks(), slots);
    return found.dp;
  };
  const Plan plan{.pp = 2, .dp = 6, .tp = 2, .microbatches = 2};
  for (const auto& [slots, dp] : {std::pair{1000, 6}, {24, 6}, {23, 4}, {15, 3}, {4, 1}})
    EXPECT_EQ(on(plan, slots), dp) << slots;  // with 23 slots: 12 micro-batches in total are not divisible by 5
  EXPECT_THROW(plan_on(plan, 3), Error);
  const Plan groups{.dp = 6, .zero = ZeroStage::two, .shard_ranks = 2, .microbatches = 2};
  const Plan experts{.dp = 6, .ep = 2, .microbatches = 2};
  EXPECT_EQ(on(groups, 6), 6);
  for (const Plan& shared : {groups, experts}) {
    SCOPED_TRACE(to_text(shared));
    EXPECT_EQ(on(shared, 5), 4);
    EXPECT_EQ(on(shared, 3), 2);
    EXPECT_THROW(plan_on(shared, 1), Error);
  }
}

TEST(Restarts, DoesNotRetryPermanentFailures) {
  for (const int status : {0, 2, 4, 5, 6, 127, 130, 143}) EXPECT_FALSE(is_retryable(status)) << status;
  for (const int status : {1, 3, 134, 137, 139}) EXPECT_TRUE(is_retryable(status)) << status;
}

TEST(Hostfile, ParsesMpirunFormat) {
  const auto hosts = parse_hosts("# two\n\n  node1 slots=4 # here\r\nnode2:3\nnode3\nnode1 slots=0", "hosts");
  EXPECT_TRUE(hosts.size() == 4 && hosts[1].name == "node2");
  EXPECT_EQ(count_slots(hosts), 8);
  for (const auto& [text, args] : {std::pair{"a\nb slots=x", "hosts: line 2: expected 0 to 100000 slots, got 'x'"},
                                   {"a slots=-1", "got '-1'"},
                                   {"a:1000000", "got '1000000'"},
                                   {"a 4", "expected slots=N after the host, got '4'"},
                                   {"a slots=4 max", "expected nothing after the number of slots, got 'max'"},
                                   {":4", "expected a host name"}})
    expect_error(Status::input, {args}, [&, text = text] { parse_hosts(text, "hosts"); });
}

std::vector<pid_t> child_processes(pid_t parent) {
  std::vector<pid_t> out;
  std::error_code gone;
  for (fs::directory_iterator it(fmt::format("/proc/{}/task", parent), gone), end; !gone && it != end;
       it.increment(gone)) {
    std::ifstream file(it->path() / "children");
    for (pid_t child = 0; file >> child;) out.push_back(child);
  }
  return out;
}

class RestartsTest : public ProgramTest {
 protected:
  static bool is_running(pid_t process) {
    std::error_code gone;
    return !fs::read_symlink(fmt::format("/proc/{}/exe", process), gone).empty();
  }
  // Starts the launcher of a run and waits until this step is saved.
  pid_t launched(const std::string& more, int64_t step = 20) const {
    const pid_t launcher = start("train " + kSettings + more + " --out run");
    EXPECT_TRUE(test::comes([&] { return newest_saved() >= step; })) << log();
    return launcher;
  }
  // Waits until "run" has completed `step` steps since the last start, then kills the process that `whom` selects below
  // the launcher.
  void kill_at(int64_t step, const std::function<pid_t()>& whom) const {
    pid_t rank = 0;
    ASSERT_TRUE(test::comes([&] { return (rank = whom()) > 0; }));
    ASSERT_TRUE(test::comes([&] { return newest_saved() >= step; })) << read_file(path("err.txt"));
    ASSERT_EQ(kill(rank, SIGKILL), 0);
    ASSERT_TRUE(test::comes([&] { return whom() != rank; }));
  }
  static std::function<pid_t()> child_process(pid_t launcher) {
    return [launcher] {
      const auto all = child_processes(launcher);
      return all.empty() ? 0 : all.front();
    };
  }
  void expect_logged(const std::string& args) const { expect_has(log(), args); }
  std::string wait_for_exit(const std::string& run) const { return files(run + kEnd); }
  const std::string kSettings = kSmall + "--steps 240 --save-every 20 --eval-every 0 --dropout 0.1 ";
  const std::string kEnd = "/checkpoints/step-240";
};

TEST_F(RestartsTest, RestartedRunMatchesUninterruptedRunBitwise) {
  must("train " + kSettings + "--ranks 2 --out whole");
  const pid_t launcher = start("train " + kSettings + "--ranks 2 --restarts 2 --out run");
  kill_at(40, child_process(launcher));
  kill_at(120, child_process(launcher));
  EXPECT_EQ(test::wait_for_exit(launcher), 0) << log();
  EXPECT_TRUE(wait_for_exit("run") == wait_for_exit("whole"));
  expect_has(log(), {"start 1 of 3 failed at step ", "killed by signal 9 (Killed); ",
                     "2 restarts: ", "start 3 of 3: 2 ranks (pp 1 x dp 2 x cp 1 x tp 1), 1 micro-batch each"});
}

TEST_F(RestartsTest, RunResumesAfterLastRestart) {
  must("train " + kSettings + "--ranks 2 --out whole");
  const pid_t launcher = start("train " + kSettings + "--ranks 2 --zero 1 --restarts 1 --out run");
  kill_at(40, child_process(launcher));
  kill_at(100, child_process(launcher));
  EXPECT_EQ(test::wait_for_exit(launcher), 3);
  expect_has(log(),
             "tessera: --restarts: all 1 restarts failed; last failure: killed by signal 9 (Killed); tessera "
             "train --resume --out run resumes after step ");
  must("train --resume --out run");
  EXPECT_TRUE(wait_for_exit("run") == wait_for_exit("whole"));
}

TEST_F(RestartsTest, DoesNotRetryPermanentFailures) {
  const auto fails_once = [&](const std::string& options, int status, const std::string& args) {
    const Ran r = run("train " + kSmall + "--quiet --restarts 5 " + options);
    EXPECT_EQ(r.status, status) << r.err;
    EXPECT_EQ(std::ranges::count(r.err, '\n'), 1) << r.err;
    expect_has(r.err, args);
  };
  fails_once("--lr 1e30 --min-lr 1e30 --warmup 0 --clip 0 --steps 50", 5, "expected finite values");
  fails_once("--data missing.txt", 4, "missing.txt");
  fails_once("--ranks 5", 2, "--batch: 4 is not divisible by 5 data ranks");
  fails_once("--launch 'no-such-program -n {ranks}'", 2,
             "--launch: no-such-program cannot be started: command not found");
  fails_once("--hostfile none", 4, "--hostfile: cannot open none");
  fails_once("--no-save", 2, "--restarts: cannot be combined with --no-save");
  fails_once("--launch mpirun --hostfile text.txt", 2, "--launch: with --hostfile, expected {ranks} in the command");
  fails("train " + kSmall + "--launch mpirun", 2, "--launch: requires --restarts N");
  for (const auto& entry : fs::directory_iterator(path("runs")))  // the run with the non-finite loss
    EXPECT_TRUE(fs::exists(entry.path() / "config.toml")) << entry.path();
}

TEST_F(RestartsTest, FewerSlotsReduceDataRanksAtConstantBatchSize) {
  must("train " + kSettings + "--ranks 4 --optimizer sgd --out whole");
  write_file(path("hosts"), "localhost slots=4\n");
  const pid_t launcher = launched("--ranks 4 --optimizer sgd --restarts 1 --hostfile hosts", 40);
  write_file(path("hosts"), "localhost slots=2  # one has gone\n");
  kill_at(60, child_process(launcher));
  EXPECT_EQ(test::wait_for_exit(launcher), 0) << log();
  expect_has(log(), {"2 slots on 1 host: localhost 2",
                     "2 of 4 data ranks: each now computes 2 micro-batches with an unchanged batch size",
                     "start 2 of 2: 2 ranks (pp 1 x dp 2 x cp 1 x tp 1), 2 micro-batches each"});
  expect_has(read_file(path("run/config.toml")), "dp = 2\n");
  // Rounding differences only, after more than a hundred steps of SGD.
  const Safetensors one(path("whole" + kEnd) / "model.safetensors"), other(path("run" + kEnd) / "model.safetensors");
  double max_difference = 0, largest = 0;
  for (size_t i = 0; i < one.tensors().size(); ++i) {
    const auto a = one.tensors()[i].bytes, b = other.tensors()[i].bytes;
    ASSERT_EQ(a.size(), b.size());
    for (size_t at = 0; at < a.size(); at += 4) {
      float x = 0, y = 0;
      std::memcpy(&x, a.data() + at, 4), std::memcpy(&y, b.data() + at, 4);
      max_difference = std::max<double>(max_difference, std::abs(x - y)),
      largest = std::max<double>(largest, std::abs(x));
    }
  }
  EXPECT_LT(max_difference, 1e-3 * largest);
}

TEST_F(RestartsTest, SignalToLauncherStopsRunAfterStep) {
  for (const int signal : {SIGINT, SIGTERM}) {
    const pid_t launcher = launched("--steps 100000 --restarts 5");
    const pid_t rank = child_process(launcher)();
    kill(launcher, signal);
    EXPECT_EQ(test::wait_for_exit(launcher), 128 + signal);
    EXPECT_FALSE(is_running(rank));
    expect_logged("stopped after step ");
    expect_lacks(log(), "start 2");
    fs::remove_all(path("run"));
  }
}

TEST_F(RestartsTest, KilledLauncherLeavesNoRanks) {
  const pid_t launcher = launched("--steps 100000 --restarts 5");
  const pid_t rank = child_process(launcher)();
  kill(launcher, SIGKILL);
  test::wait_for_exit(launcher);
  EXPECT_TRUE(test::comes([&] { return !is_running(rank); }));
  expect_logged("stopped after step ");
}

// Ranks with a rendezvous: a killed rank ends the others, and their launchers restart all of them together.
TEST_F(RestartsTest, LaunchersRestartAllRendezvousRanks) {
  must("train " + kSettings + "--ranks 2 --out whole");
  const std::string rendezvous =
      fmt::format("{}--ranks 2 --rendezvous {} --restarts 2 --out run ", kSettings, test::free_address());
  const pid_t first = start("train " + rendezvous + "--rank 0"), second = start("train " + rendezvous + "--rank 1");
  kill_at(40, child_process(second));
  EXPECT_EQ(test::wait_for_exit(first), 0) << log();
  EXPECT_EQ(test::wait_for_exit(second), 0) << log();
  EXPECT_TRUE(wait_for_exit("run") == wait_for_exit("whole"));
}

class MpirunRestartsTest : public RestartsTest {
 protected:
  void SetUp() override {
    if (!kWithMpi || std::system("mpirun --version 2>/dev/null | grep -qiE 'open(rte| mpi)'") != 0)
      GTEST_SKIP() << "Open MPI is not installed";
    must("train " + kSettings + "--ranks 2 --out whole");
    launcher_ = start("train " + kSettings +
                      "--ranks 2 --restarts 2 --out run --launch 'mpirun --allow-run-as-root --oversubscribe -x "
                      "RANKS={ranks} -n {ranks}'");
  }
  pid_t rank() const {
    for (const pid_t mpirun : child_processes(launcher_))
      for (const pid_t child : child_processes(mpirun))
        if (std::error_code gone;
            fs::read_symlink(fmt::format("/proc/{}/exe", child), gone) == fs::path(TESSERA_BINARY))
          return child;
    return 0;
  }
  void expect_restart() const {
    EXPECT_EQ(test::wait_for_exit(launcher_), 0) << log();
    EXPECT_TRUE(wait_for_exit("run") == wait_for_exit("whole"));
    expect_logged("start 2 of 3: 2 ranks");
  }
  pid_t launcher_ = 0;
};

// mpirun ends the other ranks, and the launcher restarts mpirun.
TEST_F(MpirunRestartsTest, RestartsAllRanksIfOneIsKilled) {
  kill_at(40, [&] { return rank(); });
  expect_restart();
  expect_logged("has failed: its process ");
}

// The ranks of the killed mpirun survive for a while, one of them stopped, and hold the run's lock.
TEST_F(MpirunRestartsTest, RestartsKilledMpirunAfterItsRanksExit) {
  ASSERT_TRUE(test::comes([&] { return rank() > 0; }));
  kill(rank(), SIGSTOP);
  kill_at(0, child_process(launcher_));
  expect_restart();
  expect_logged("of the last start");
}

}  // namespace
}  // namespace tessera
