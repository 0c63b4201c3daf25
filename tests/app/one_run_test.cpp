// Run directories: single writer, run identity, and retained checkpoints.
#include <fcntl.h>
#include <sys/stat.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <fstream>
#include <functional>
#include <iostream>
#include <map>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "app/report/report.h"
#include "tests/app/program.h"

namespace tessera {
namespace {

class RunDirectoryTest : public ProgramTest {
 protected:
  // Starts the run in "run" and waits for its first step.
  pid_t begun(const std::string& more) const {
    const pid_t child = start("train " + kSmall + "--steps 10000000 --out run --quiet " + more);
    EXPECT_TRUE(test::comes([&] { return fs::exists(path("run/metrics.jsonl")); }));
    return child;
  }
  // One job of two processes, each with its own arguments and directory, which the shell selects by rank: mpirun of
  // Debian 13 crashes if it is given two programs.
  Ran two_processes(const std::string& first, const std::string& second, const std::string& first_folder = ".",
                    const std::string& second_folder = ".") const {
    return run_program("mpirun",
                       fmt::format("--allow-run-as-root --oversubscribe -n 2 sh -c 'case $OMPI_COMM_WORLD_RANK in 0) "
                                   "cd {} && exec {} {};; *) cd {} && exec {} {};; esac'",
                                   first_folder, TESSERA_BINARY, first, second_folder, TESSERA_BINARY, second));
  }
};

TEST_F(RunDirectoryTest, RejectsSecondWriterOfLiveRun) {
  const pid_t child = begun("--save-every 0 --eval-every 0");
  const std::string owner = fmt::format("process {} on ", child);
  fails("train --resume --out run", 2, owner);
  fails("train " + kSmall + "--out run", 2, "already contains a run");
  kill(child, SIGSTOP);
  fails("train --resume --out run", 2, owner);
  kill(child, SIGKILL);
  kill(child, SIGCONT);
  EXPECT_EQ(test::wait_for_exit(child), 1000);
  must("train --resume --out run --steps 3 --warmup 1");
}

TEST_F(RunDirectoryTest, MovedDirectoryAbortsRun) {
  const pid_t child = begun("--save-every 5");
  fs::rename(path("run"), path("other"));
  EXPECT_EQ(test::wait_for_exit(child), 6);
  expect_has(log(), "removed, moved or replaced");
  EXPECT_FALSE(fs::exists(path("run")));
  EXPECT_TRUE(fs::exists(path("other/config.toml")));
}

TEST_F(RunDirectoryTest, RemovedMetricsFileAbortsRun) {
  const pid_t child = begun("--save-every 1000000");
  fs::remove(path("run/metrics.jsonl"));
  EXPECT_EQ(test::wait_for_exit(child), 6);
  expect_has(log(), "metrics.jsonl: the file was removed, moved or replaced");
}

TEST_F(RunDirectoryTest, DoesNotModifyReplacementDirectory) {
  const pid_t child = begun("--save-every 1000000");
  fs::rename(path("run"), path("other"));
  fs::create_directories(path("run/checkpoints/step-1"));
  std::ofstream(path("run/lock")) << "of another";
  EXPECT_EQ(test::wait_for_exit(child), 6);
  EXPECT_TRUE(fs::exists(path("run/checkpoints/step-1")));
  EXPECT_EQ(read_file(path("run/lock")), "of another");
}

// The same token ids with a different alphabet; and the same training text with a different ending.
TEST_F(RunDirectoryTest, RejectsDifferentTextWithSameTokenIds) {
  train("--steps 4 --out run");
  const std::string text = read_file(path("text.txt")),
                    tokenizer = read_file(path("run/checkpoints/step-4/tokenizer.json"));
  std::string shifted = text, tail = text;
  for (char& c : shifted)
    if (c >= 'a' && c <= 'y') ++c;
  for (size_t i = tail.size() - 200; i < tail.size(); ++i)
    if (tail[i] == 'l') tail[i] = 's';
  std::ofstream(path("text.txt")) << shifted;
  fails("train --resume --out run --steps 8", 2, "vocabulary is");
  std::ofstream(path("text.txt")) << tail;
  fails("train --resume --out run --steps 8", 2, "validation is");
  EXPECT_EQ(read_file(path("run/checkpoints/step-4/tokenizer.json")), tokenizer);
  std::ofstream(path("text.txt")) << text;
  must("train --resume --out run --steps 8");
}

TEST_F(RunDirectoryTest, RetainsNewestAndBestCheckpoints) {
  train("--steps 60 --lr 0.5 --min-lr 0.5 --save-every 10 --eval-every 10 --keep 3 --out run");
  const std::optional<BestCheckpoint> best = best_checkpoint(checkpoints());
  ASSERT_TRUE(best);
  size_t count = 0;
  for (const auto& e : fs::directory_iterator(checkpoints()))
    count += e.path().filename().string().starts_with("step-");
  EXPECT_EQ(count, best->step < 40 ? 4U : 3U);
  EXPECT_EQ(newest_step(), 60);
  double lowest = 1e9;
  for (const auto& record : parse_records(read_file(path("run/metrics.jsonl"))))
    if (record["event"] == "eval") lowest = std::min<double>(lowest, record["val_loss"]);
  EXPECT_NEAR(best->val_loss, lowest, 1e-6);
  must("generate run/checkpoints/best --tokens 3");
}

// The last update turns finite gradients into infinities, and no later loss would reveal it.
TEST_F(RunDirectoryTest, DoesNotSaveNonFiniteWeights) {
  const std::string huge = "--optimizer sgd --clip 0 --momentum 0 --warmup 0 --lr 1e300 --min-lr 1e300 ";
  fails("train " + kSmall + huge + "--steps 1 --save-every 1 --out run", 5, "contains inf or nan after the update");
  EXPECT_TRUE(!fs::exists(checkpoints()) || fs::is_empty(checkpoints()));
}

TEST_F(RunDirectoryTest, ResumeSkipsNonFiniteCheckpoint) {
  train("--steps 8 --save-every 4 --out run");
  std::string bytes = weights("run/checkpoints/step-8");
  const uint32_t nan = 0x7fc00000;
  bytes.replace(bytes.size() - 4, 4, reinterpret_cast<const char*>(&nan), 4);
  rewrite(checkpoints() / "step-8", "model.safetensors", bytes);
  fails("generate run/checkpoints/step-8 --tokens 3", 4, "has inf or nan at element");
  const auto resumed = must("train --resume --out run --steps 10");
  expect_has(resumed.err, {"skipped a checkpoint: ", "resuming after step 4"});
}

// Every rank writes its shard while the next steps run; the file equals that of one rank.
TEST_F(RunDirectoryTest, BackgroundCheckpointsMatchOneRank) {
  const std::string often = "--steps 40 --save-every 3 --keep 20 --microbatches 4 --layers 2 ";
  train(often + "--ranks 1 --tie-copies --out one");
  for (const char* plan :
       {"--pp 2 --dp 1", "--zero 3 --dp 2 --microbatches 2 --check-replicas 1", "--dp 2 --microbatches 2"}) {
    anew("train " + kSmall + often + plan + " --tie-copies --out run");
    for (int step = 3; step < 40; step += 3) {
      const std::string name = fmt::format("checkpoints/step-{}", step);
      const bool same = !std::string(plan).starts_with("--pp") || files("run/" + name) == files("one/" + name);
      EXPECT_TRUE(same) << plan << step;
      EXPECT_NO_THROW(open_checkpoint(path("run/" + name))) << plan << step;
    }
    EXPECT_EQ(partial_files(), std::vector<std::string>());
  }
}

#if TESSERA_WITH_MPI
TEST_F(RunDirectoryTest, UnstartedRankAbortsMpiJob) {
  const Ran r =
      run_program("mpirun", fmt::format("--allow-run-as-root --oversubscribe -n 2 sh -c 'test $OMPI_COMM_WORLD_RANK = "
                                        "0 || kill -STOP $$; exec {} train {} --timeout 2'",
                                        TESSERA_BINARY, kSmall));
  EXPECT_EQ(r.status, 3);
  expect_has(r.err, "tessera: [rank 0] MPI_Init: the other ranks did not arrive within 2 s");
}

TEST_F(RunDirectoryTest, ReportsRankExitBeforeMpiInit) {
  const auto ran = [&](const std::string& first) {
    return run_program("mpirun",
                       fmt::format("--allow-run-as-root --oversubscribe -n 2 sh -c '{}; exec {} train {} --steps 2 "
                                   "--timeout 20'",
                                   first, TESSERA_BINARY, kSmall));
  };
  const Ran killed = ran("test $OMPI_COMM_WORLD_RANK = 0 || { sleep 1; kill -KILL $$; }");
  EXPECT_NE(killed.status, 0);
  expect_has(killed.err,
             "tessera: [rank 0] MPI_Init: the launcher is terminating the job (SIGTERM); a rank may have exited before "
             "all ranks started");
  const Ran few = ran("ulimit -n 16");
  EXPECT_EQ(few.status, 2);
  expect_has(few.err, "[mpi] MPI requires at least 64 file descriptors, but `ulimit -n` is 16");
  EXPECT_EQ(ran("ulimit -Sn 16").status, 0) << "a soft limit is raised";
}

TEST_F(RunDirectoryTest, RejectsProcessesWithDifferentOptions) {
  const std::string all = "train " + kSmall + "--out run ";
  const auto refused = [&](const std::string& first, const std::string& second, const std::string& args) {
    const auto ran = two_processes(first, second);
    EXPECT_EQ(ran.status, 2) << first << ran.err;
    expect_has(ran.err, args);
    EXPECT_FALSE(fs::exists(path("run"))) << args;
    fs::remove_all(path("run"));
  };
  refused(all + "--seed 1", all + "--seed 2", "--seed is 1 on rank 0 and 2 on rank 1");
  refused(all, all + "--lr 0.5", "--lr is 0.03 on rank 0 and 0.5 on rank 1");
  refused(all, all + "--microbatches 2", "--microbatches is 1 on rank 0 and 2 on rank 1");
  refused("verify --steps 2", "verify --steps 3", "--steps is 2 on rank 0 and 3 on rank 1");
  refused("verify --steps 2", "report nothing", "only train, verify, generate, evaluate and bench");
  EXPECT_EQ(two_processes(all, all).status, 0);
}

TEST_F(RunDirectoryTest, RejectsProcessesInDifferentDirectories) {
  const std::string text = read_file(path("text.txt"));
  for (const std::string directory : {"a", "b"}) {
    fs::create_directories(path(directory));
    write(directory + "/text.txt", text);
  }
  const auto refused = [&](const std::string& more, const std::string& args) {
    const std::string all = "train " + kSmall + "--save-every 4 " + more;
    const auto ran = two_processes(all, all, path("a"), path("b"));
    EXPECT_EQ(ran.status, 2) << ran.err;
    expect_has(ran.err, args);
  };
  refused("--out run", "run directory` is locked by process");
  std::string other = text;
  other[5] = other[5] == '1' ? '2' : '1';
  write("b/text.txt", other);
  refused("--out " + path("run").string(), "--data is ");
}
#endif

// Signals end every command promptly, with the right status and without incomplete files.

constexpr double kSoon = 4;  // seconds; the documented limit is 2, but the machine may be busy

class SignalsTest : public ProgramTest {
 protected:
  // Writes a text that takes long to tokenize and to train on.
  void write_long_text() const {
    const Philox random{7};
    std::string text;
    for (uint64_t i = 0; text.size() < 12'000'000; ++i) {
      for (uint64_t n = 0; n < 3 + random.below(9, i); ++n)
        text += static_cast<char>('a' + random.below(26, 16 * i + n + (uint64_t{1} << 40)));
      text += i % 11 == 0 ? '\n' : ' ';
    }
    std::ofstream(path("long.txt")) << text;
  }
  static void wait_until(const std::function<bool()>& condition) {
    EXPECT_TRUE(test::comes(condition)) << "waited for too long";
  }
  // Whether the program has installed its handlers.
  static bool handles(pid_t child, int signal) {
    std::ifstream status(fmt::format("/proc/{}/status", child));
    for (std::string line; std::getline(status, line);)
      if (line.starts_with("SigCgt:")) return (std::stoull(line.substr(7), nullptr, 16) >> (signal - 1) & 1U) != 0;
    return false;
  }
  // The exit status, or 1000 if the process ended otherwise or not in time.
  static int wait_for_exit(pid_t child) {
    int status = 0;
    if (test::ends(child, status, kSoon, SIGKILL)) return test::exit_status(status);
    ADD_FAILURE() << "did not end in time";
    return 1000;
  }
  // Starts the command and sends it a signal some time after it is `ready`.
  int signalled(const std::string& arguments, int signal, const std::function<bool()>& ready = {},
                const std::string& before = "") const {
    const pid_t child = start(arguments, before);
    wait_until([&] { return handles(child, SIGTERM); });
    if (ready) wait_until(ready);
    std::this_thread::sleep_for(std::chrono::milliseconds(300));
    kill(child, signal);
    return wait_for_exit(child);
  }
  static void expect_to_survive(pid_t child, int signal) {
    kill(child, signal);
    std::this_thread::sleep_for(std::chrono::milliseconds(300));
    EXPECT_EQ(waitpid(child, nullptr, WNOHANG), 0) << "ended";
  }
  std::string names() const {
    std::string all;
    for (const auto& e : fs::recursive_directory_iterator(directory_.path())) all += e.path().filename().string() + " ";
    return all;
  }
  bool exists(const char* name) const { return fs::exists(path(name)); }

  const std::function<bool()> begun_ = [this] { return recorded() > 0; };
  const std::string endless_ = "train " + kSmall + "--steps 100000000 --save-every 0 --eval-every 0 --out run ";
};

TEST_F(SignalsTest, TerminatedCommandsLeaveNoTemporaryFiles) {
  write_long_text();
  train("--out made-run --trace");
  ASSERT_EQ(mkfifo(path("pipe").c_str(), 0600), 0);
  const std::string before = names();
  for (const char* arguments :
       {"data long.txt --tokenizer bpe --vocab 30000 --out made", "train --data long.txt --tokenizer bpe --out run",
        "verify --steps 1000000 --threads-per-rank 1", "bench --benchmark_filter=matmul --benchmark_min_time=1000",
        "generate made-run --tokens 100000000", "report made-run --out pipe", "explore --port 0"}) {
    SCOPED_TRACE(arguments);
    EXPECT_EQ(signalled(arguments, SIGINT), 130);
    EXPECT_EQ(signalled(arguments, SIGTERM), 143) << log();
    expect_has(log(), "tessera: terminated (SIGTERM)\n");
    EXPECT_EQ(signalled(arguments, SIGHUP), 143);
    std::string after = names();
    if (const size_t at = after.find("err.txt "); before.find("err.txt ") == std::string::npos) after.erase(at, 8);
    EXPECT_EQ(std::count(after.begin(), after.end(), ' '), std::count(before.begin(), before.end(), ' '))
        << before << "\n"
        << after;
  }
}

TEST_F(SignalsTest, SignalsStopValidationAndSaveCompletedSteps) {
  write_long_text();
  const std::string options = "train " + kSmall + "--data long.txt --batch 2 --save-every 0 --out run ";
  const std::function<bool()> saved = [&] { return exists("run/checkpoints/latest"); };
  for (const auto& [more, ready] : {std::pair{"--steps 2", saved},
                                    {"--steps 4 --eval-every 2", begun_},
                                    {"--steps 2 --ranks 2 --dp-mode ps-async", saved}}) {
    EXPECT_EQ(signalled(options + more, SIGTERM, ready), 143) << more;
    expect_has(log(), "stopped during the validation after step 2, which was saved; tessera train --resume --out run");
    EXPECT_EQ(read_file(path("run/checkpoints/latest")), "step-2\n");
    expect_lacks(read_file(path("run/metrics.jsonl")), "eval");
    fs::remove_all(path("run"));
  }
}

// A run that was stopped before a validation performs it when it is resumed.
TEST_F(SignalsTest, ResumedRunRepeatsInterruptedValidation) {
  train("--eval-every 5 --save-every 5 --out run");
  const std::string all_records = read_file(path("run/metrics.jsonl"));
  fs::remove_all(path("run/checkpoints/step-12"));
  const size_t eval = all_records.find("{\"event\":\"eval\",\"step\":10"), after = all_records.find('\n', eval) + 1;
  std::ofstream(path("run/metrics.jsonl")) << all_records.substr(0, eval);
  must("train --resume --out run");
  const std::string resumed = read_file(path("run/metrics.jsonl"));
  EXPECT_EQ(resumed.substr(0, after), all_records.substr(0, after));
}

TEST_F(SignalsTest, SignalsSaveCheckpointExceptIgnoredHangup) {
  for (const auto& [signal, status] : {std::pair{SIGINT, 130}, {SIGTERM, 143}, {SIGHUP, 143}}) {
    EXPECT_EQ(signalled(endless_, signal, begun_), status);
    EXPECT_GT(newest_step(), 0) << signal;
    expect_has(log(), "resumes");
    fs::remove_all(path("run"));
  }
  const pid_t child = start(endless_, "trap '' HUP;");
  wait_until(begun_);
  expect_to_survive(child, SIGHUP);
  kill(child, SIGTERM);
  EXPECT_EQ(wait_for_exit(child), 143);
}

TEST_F(SignalsTest, SigUsr1SavesCheckpointAndContinues) {
  for (const char* more : {"", "--ranks 2", "--ranks 2 --zero 3", "--ranks 2 --dp-mode ps-async"}) {
    SCOPED_TRACE(more);
    const pid_t child = start(endless_ + more);
    wait_until(begun_);
    kill(child, SIGUSR1);
    wait_until([&] { return exists("run/checkpoints/latest"); });
    const auto then = recorded();
    wait_until([&] { return recorded() > then; });
    const std::string first = read_file(path("run/checkpoints/latest"));
    kill(child, SIGTERM);
    EXPECT_EQ(wait_for_exit(child), 143);
    EXPECT_NE(read_file(path("run/checkpoints/latest")), first);
    expect_has(log(), "SIGUSR1: saved after step");
    fs::remove_all(path("run"));
  }
  EXPECT_EQ(signalled(endless_ + "--no-save", SIGTERM, [&] { return exists("run/metrics.jsonl"); }), 143);
}

TEST_F(SignalsTest, SecondSignalTerminatesRunImmediately) {
  // The single step takes long.
  const pid_t child = start(
      "train --data text.txt --layers 8 --heads 8 --channels 512 --context 512 --batch 64 --threads-per-rank 1 "
      "--no-save --steps 1000 --out run");
  wait_until([&] { return exists("run/metrics.jsonl"); });
  expect_to_survive(child, SIGINT);  // until the end of its step
  kill(child, SIGINT);
  EXPECT_EQ(wait_for_exit(child), 130);
}

// SIGKILL leaves no chance for a cleanup.
TEST_F(SignalsTest, NextProcessRemovesTemporaryFilesOfKilledProcess) {
  fs::create_directories(path("cache/datasets"));
  const pid_t dead = fork();
  if (dead == 0) {
    for (const char* name : {"made", "cache/datasets/0123", "cache/austen.txt"})
      fs::create_directory((new TemporaryName(path(name)))->path());
    _exit(0);
  }
  waitpid(dead, nullptr, 0);
  const TemporaryName living(path("made"));
  fs::create_directory(living.path());
  fs::create_directory(path("mine.tmp-999999999"));
  const std::string left = fmt::format(".tmp-{}-", dead);
  expect_has(names(), left);
  must("data text.txt --out other");
  must("data text.txt");
  expect_lacks(names(), left);
  EXPECT_TRUE(fs::exists(living.path()));
  EXPECT_TRUE(exists("mine.tmp-999999999"));
}

// Flight records of failed runs and their reports; a straggler is named.

const char* const kFile =
    R"({"rank": 1, "ranks": 3, "cause": "dp axis, barrier: rank 2 did not arrive", "operations": [)"
    R"({"axis": "dp", "number": 1, "operation": "all_reduce", "bytes": 40, "begun": 1.0, "ended": 1.5}, )"
    R"({"axis": "dp", "number": 2, "operation": "barrier", "bytes": 0, "begun": 2.0, "ended": null}]})"
    "\n"
    R"({"rank": 0, "ranks": 3, "cause": "", "operations": [)"
    R"({"axis": "dp", "number": 1, "operation": "all_reduce", "bytes": 40, "begun": 1.0, "ended": 1.5}, )"
    R"({"axis": "dp", "number": 2, "operation": "all_gather", "bytes": 8, "begun": 2.0, "ended": null}]})"
    "\n";

TEST(FlightReport, ShowsMissingAndDifferingRanks) {
  const report::Flights all = report::parse_flights(kFile, "flight.json");
  ASSERT_TRUE(all.ranks == 3 && all.written.size() == 2 && all.written[0].rank == 0);
  const std::string text = report::record_flights(all, false), html = report::record_flights(all, true);
  expect_has(text, {"rank 1    dp axis, barrier: rank 2 did not arrive", "rank 2    no record"});
  const size_t second = text.find("\n  2 ");
  ASSERT_NE(second, std::string::npos) << text;
  expect_has(text.substr(second), {"DIFFERS", "barrier of 0 bytes, since 2.000 s"});
  expect_lacks(text.substr(0, second), "DIFFERS");
  expect_has(html, {"<tr class=\"differs\">", "no record"});
}

TEST(FlightReport, RejectsInvalidRecords) {
  for (const char* file : {"[]", "{}", R"({"rank": 5, "ranks": 2, "cause": "", "operations": []})",
                           R"({"rank": 0, "ranks": 1, "cause": "", "operations": [{"axis": 3}]})",
                           R"({"rank": -1, "ranks": 1, "cause": "", "operations": []})"})
    EXPECT_THROW(report::parse_flights(file, "flight.json"), InputError) << file;
}

using FlightRecordTest = ProgramTest;

// The loss soon becomes NaN: every rank records the cause, and the report shows it.
TEST_F(FlightRecordTest, FailedRunWritesFlightRecord) {
  fails("train " + kSmall + "--ranks 2 --lr 1e30 --steps 200 --out run", 5, "expected finite values");
  ASSERT_TRUE(fs::exists(path("run/flight.json")));
  expect_has(must("report run --format text").out, {"axis dp", "all_reduce"});
  must("report run");
  EXPECT_TRUE(fs::exists(path("run/report.html")));
}

TEST_F(FlightRecordTest, SuccessfulRunWritesNoFlightRecord) {
  const Ran r = train("--ranks 2 --format json --out run");
  EXPECT_FALSE(fs::exists(path("run/flight.json")));
  expect_has(r.out, "\"straggler\":null");
}

}  // namespace
}  // namespace tessera
