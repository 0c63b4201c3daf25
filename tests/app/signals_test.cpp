// The effects of signals on every command: they end it soon, with its status, and nothing half-written stays.
#include <fcntl.h>
#include <signal.h>
#include <sys/stat.h>

#include "app/report/report.h"
#include "tests/app/program.h"

namespace tessera {

namespace {
namespace fs = std::filesystem;
using Clock = std::chrono::steady_clock;

constexpr double kSoon = 4;  // seconds; promised are 2, and a machine may be busy

class SignalsTest : public test::ProgramTest {
 protected:
  // Writes a text of words that a tokenizer takes long to learn and a model long to read.
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
    const auto end = Clock::now() + std::chrono::seconds(60);
    while (!condition()) {
      ASSERT_LT(Clock::now(), end) << "waited for too long";
      std::this_thread::sleep_for(std::chrono::milliseconds(2));
    }
  }
  // Whether the program has installed its handlers.
  static bool handles(pid_t child, int signal) {
    std::ifstream status(fmt::format("/proc/{}/status", child));
    for (std::string line; std::getline(status, line);)
      if (line.starts_with("SigCgt:")) return (std::stoull(line.substr(7), nullptr, 16) >> (signal - 1) & 1U) != 0;
    return false;
  }
  // The exit status, or 1000 when it ended in another way or not soon.
  static int end_of(pid_t child) {
    const auto end = Clock::now() + std::chrono::duration<double>(kSoon);
    int status = 0;
    while (waitpid(child, &status, WNOHANG) == 0) {
      if (Clock::now() > end) {
        kill(child, SIGKILL);
        waitpid(child, &status, 0);
        ADD_FAILURE() << "it did not end soon";
        return 1000;
      }
      std::this_thread::sleep_for(std::chrono::milliseconds(2));
    }
    return WIFEXITED(status) ? WEXITSTATUS(status) : 1000;
  }
  // Begins the command and sends it a signal a while after it is `ready`.
  int signalled(const std::string& arguments, int signal, const std::function<bool()>& ready = {},
                const std::string& before = "") const {
    const pid_t child = start(arguments, before);
    wait_until([&] { return handles(child, SIGTERM); });
    if (ready) wait_until(ready);
    std::this_thread::sleep_for(std::chrono::milliseconds(300));
    kill(child, signal);
    return end_of(child);
  }
  std::string names() const {
    std::string all;
    for (const auto& e : fs::recursive_directory_iterator(folder_.path())) all += e.path().filename().string() + " ";
    return all;
  }
  bool exists(const char* name) const { return fs::exists(path(name)); }

  const std::string endless_ = "train " + kSmall + "--steps 100000000 --save-every 0 --eval-every 0 --out run ";
};

TEST_F(SignalsTest, EndEveryCommandSoonAndLeaveNothing) {
  write_long_text();
  ASSERT_EQ(train("--out made-run --trace").status, 0);
  ASSERT_EQ(mkfifo(path("pipe").c_str(), 0600), 0);
  const std::string before = names();
  for (const char* arguments :
       {"data long.txt --tokenizer bpe --vocab 30000 --out made", "train --data long.txt --tokenizer bpe --out run",
        "verify --steps 1000000 --threads-per-rank 1", "bench --benchmark_filter=matmul --benchmark_min_time=1000",
        "generate made-run --tokens 100000000", "report made-run --out pipe", "explore --port 0"}) {
    EXPECT_EQ(signalled(arguments, SIGINT), 130) << arguments;
    EXPECT_EQ(signalled(arguments, SIGTERM), 143) << arguments << ": " << read_file(path("err.txt"));
    EXPECT_NE(read_file(path("err.txt")).find("tessera: terminated (SIGTERM)\n"), std::string::npos) << arguments;
    EXPECT_EQ(signalled(arguments, SIGHUP), 143) << arguments;
    std::string after = names();
    if (const size_t at = after.find("err.txt "); before.find("err.txt ") == std::string::npos) after.erase(at, 8);
    EXPECT_EQ(std::count(after.begin(), after.end(), ' '), std::count(before.begin(), before.end(), ' '))
        << arguments << ": " << before << "\n"
        << after;
  }
}

TEST_F(SignalsTest, EndAValidationAndSaveTheStepsBeforeIt) {
  write_long_text();
  const std::string options =
      "train --data long.txt --layers 1 --heads 2 --channels 16 --context 16 --batch 2 "
      "--threads-per-rank 1 --warmup 2 --save-every 0 --out run ";
  const auto saved = [&] { return exists("run/checkpoints/latest"); };
  const auto recorded = [&] { return exists("run/metrics.jsonl") && fs::file_size(path("run/metrics.jsonl")) > 0; };
  struct Case {
    std::string more;
    std::function<bool()> ready;
  };
  for (const Case& c : {Case{"--steps 2", saved}, Case{"--steps 4 --eval-every 2", recorded},
                        Case{"--steps 2 --ranks 2 --dp-mode ps-async", saved}}) {
    EXPECT_EQ(signalled(options + c.more, SIGTERM, c.ready), 143) << c.more;
    const std::string log = read_file(path("err.txt"));
    EXPECT_NE(log.find("stopped in the validation after step 2, which is saved; tessera train --resume --out run"),
              std::string::npos)
        << log;
    EXPECT_EQ(read_file(path("run/checkpoints/latest")), "step-2\n");
    EXPECT_EQ(read_file(path("run/metrics.jsonl")).find("eval"), std::string::npos);
    fs::remove_all(path("run"));
  }
}

// A run that is stopped where it would have been validated makes up for it.
TEST_F(SignalsTest, AResumedRunMakesTheValidationThatWasStopped) {
  ASSERT_EQ(train("--eval-every 5 --save-every 5 --out run").status, 0);
  const std::string whole = read_file(path("run/metrics.jsonl"));
  fs::remove_all(path("run/checkpoints/step-12"));
  const size_t eval = whole.find("{\"event\":\"eval\",\"step\":10"), after = whole.find('\n', eval) + 1;
  std::ofstream(path("run/metrics.jsonl")) << whole.substr(0, eval);
  ASSERT_EQ(run("train --resume --out run").status, 0);
  const std::string resumed = read_file(path("run/metrics.jsonl"));
  EXPECT_EQ(resumed.substr(0, after), whole.substr(0, after));
}

TEST_F(SignalsTest, AHangUpIsATerminationUnlessItIsIgnored) {
  const auto recorded = [&] { return exists("run/metrics.jsonl") && fs::file_size(path("run/metrics.jsonl")) > 0; };
  EXPECT_EQ(signalled(endless_, SIGHUP, recorded), 143);
  EXPECT_TRUE(exists("run/checkpoints/latest"));
  fs::remove_all(path("run"));
  const pid_t child = start(endless_, "trap '' HUP;");
  wait_until(recorded);
  kill(child, SIGHUP);
  std::this_thread::sleep_for(std::chrono::milliseconds(300));
  EXPECT_EQ(waitpid(child, nullptr, WNOHANG), 0) << "it ended";
  kill(child, SIGTERM);
  EXPECT_EQ(end_of(child), 143);
}

TEST_F(SignalsTest, SigUsr1SavesAndTheRunGoesOn) {
  for (const char* more : {"", "--ranks 2", "--ranks 2 --zero 3", "--ranks 2 --dp-mode ps-async"}) {
    const pid_t child = start(endless_ + more);
    const auto records = [&] { return exists("run/metrics.jsonl") ? fs::file_size(path("run/metrics.jsonl")) : 0; };
    wait_until([&] { return records() > 0; });
    kill(child, SIGUSR1);
    wait_until([&] { return exists("run/checkpoints/latest"); });
    const auto then = records();
    wait_until([&] { return records() > then; });
    const std::string first = read_file(path("run/checkpoints/latest"));
    kill(child, SIGTERM);
    EXPECT_EQ(end_of(child), 143) << more;
    EXPECT_NE(read_file(path("run/checkpoints/latest")), first);
    EXPECT_NE(read_file(path("err.txt")).find("SIGUSR1: saved after step"), std::string::npos) << more;
    fs::remove_all(path("run"));
  }
  EXPECT_EQ(signalled(endless_ + "--no-save", SIGTERM, [&] { return exists("run/metrics.jsonl"); }), 143);
}

TEST_F(SignalsTest, ASecondOneEndsARunAtOnce) {
  // The only step lasts for long.
  const std::string slow =
      "train --data text.txt --layers 8 --heads 8 --channels 512 --context 512 --batch 64 "
      "--threads-per-rank 1 --no-save --steps 1000 --out run";
  const pid_t child = start(slow);
  wait_until([&] { return exists("run/metrics.jsonl"); });
  kill(child, SIGINT);
  std::this_thread::sleep_for(std::chrono::milliseconds(300));
  EXPECT_EQ(waitpid(child, nullptr, WNOHANG), 0) << "it ended before its step did";
  kill(child, SIGINT);
  EXPECT_EQ(end_of(child), 130);
}

// The killed process is one that nobody could ask to clear up.
TEST_F(SignalsTest, WhatAKilledProcessLeftIsRemovedByALaterOne) {
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
  ASSERT_NE(names().find(left), std::string::npos);
  EXPECT_EQ(run("data text.txt --out other").status, 0);
  EXPECT_EQ(run("data text.txt").status, 0);
  for (const auto& e : fs::recursive_directory_iterator(folder_.path()))
    EXPECT_EQ(e.path().filename().string().find(left), std::string::npos) << e.path();
  EXPECT_TRUE(fs::exists(living.path()));
  EXPECT_TRUE(exists("mine.tmp-999999999"));
}

// A run that fails leaves what its ranks did last, and `report` shows it; one in which a rank is slow says which.

using test::ProgramTest;
using test::Ran;

const char* const kFile =
    R"({"rank": 1, "ranks": 3, "cause": "dp axis, barrier: rank 2 did not come", "operations": [)"
    R"({"axis": "dp", "number": 1, "operation": "all_reduce", "bytes": 40, "begun": 1.0, "ended": 1.5}, )"
    R"({"axis": "dp", "number": 2, "operation": "barrier", "bytes": 0, "begun": 2.0, "ended": null}]})"
    "\n"
    R"({"rank": 0, "ranks": 3, "cause": "", "operations": [)"
    R"({"axis": "dp", "number": 1, "operation": "all_reduce", "bytes": 40, "begun": 1.0, "ended": 1.5}, )"
    R"({"axis": "dp", "number": 2, "operation": "all_gather", "bytes": 8, "begun": 2.0, "ended": null}]})"
    "\n";

TEST(FlightReport, ShowsWhoIsMissingAndWhoDiffers) {
  const report::Flights all = report::parse_flights(kFile, "flight.json");
  ASSERT_EQ(all.ranks, 3);
  ASSERT_EQ(all.written.size(), 2U);
  EXPECT_EQ(all.written[0].rank, 0);
  const std::string text = report::flights_of(all, false), html = report::flights_of(all, true);
  EXPECT_NE(text.find("rank 1    dp axis, barrier: rank 2 did not come"), std::string::npos) << text;
  EXPECT_NE(text.find("rank 2    wrote nothing"), std::string::npos) << text;
  const size_t second = text.find("\n  2 ");
  ASSERT_NE(second, std::string::npos) << text;
  EXPECT_NE(text.find("DIFFERS", second), std::string::npos) << text;
  EXPECT_EQ(text.substr(0, second).find("DIFFERS"), std::string::npos) << text;
  EXPECT_NE(text.find("barrier of 0 bytes, from 2.000 s on", second), std::string::npos) << text;
  EXPECT_NE(html.find("<tr class=\"differs\">"), std::string::npos);
  EXPECT_NE(html.find("wrote nothing"), std::string::npos);
}

TEST(FlightReport, RefusesWhatIsNone) {
  for (const char* file : {"[]", "{}", R"({"rank": 5, "ranks": 2, "cause": "", "operations": []})",
                           R"({"rank": 0, "ranks": 1, "cause": "", "operations": [{"axis": 3}]})",
                           R"({"rank": -1, "ranks": 1, "cause": "", "operations": []})"})
    EXPECT_THROW(report::parse_flights(file, "flight.json"), InputError) << file;
}

class FlightOfRun : public ProgramTest {};

// The loss is soon no number: every rank says why it ended, and the table is drawn.
TEST_F(FlightOfRun, IsLeftByAFailureAndDrawn) {
  const Ran failed = train("--ranks 2 --lr 1e30 --steps 200 --out run");
  ASSERT_EQ(failed.status, 5) << failed.err;
  ASSERT_TRUE(std::filesystem::exists(path("run/flight.json")));
  const Ran drawn = run("report run --format text");
  EXPECT_EQ(drawn.status, 0) << drawn.err;
  EXPECT_NE(drawn.out.find("axis dp"), std::string::npos) << drawn.out;
  EXPECT_NE(drawn.out.find("all_reduce"), std::string::npos) << drawn.out;
  EXPECT_EQ(run("report run").status, 0);
  EXPECT_TRUE(std::filesystem::exists(path("run/report.html")));
}

TEST_F(FlightOfRun, IsNotThereAfterAGoodEnd) {
  const Ran r = train("--ranks 2 --format json --out run");
  ASSERT_EQ(r.status, 0) << r.err;
  EXPECT_FALSE(std::filesystem::exists(path("run/flight.json")));
  EXPECT_NE(r.out.find("\"straggler\":null"), std::string::npos) << r.out;
}

}  // namespace
}  // namespace tessera
