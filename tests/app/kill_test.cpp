// A training run that is killed repeatedly, mostly while it writes a checkpoint, and resumed after each kill: it loses
// nothing, leaves no incomplete files, and is bitwise identical to an uninterrupted run.
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <iterator>
#include <map>
#include <string>
#include <thread>
#include <vector>

#include "tensor/random.h"
#include "tests/app/curves.h"
#include "tests/app/layouts.h"

namespace tessera {
namespace {

using Clock = std::chrono::steady_clock;
using Seconds = std::chrono::duration<double>;

constexpr uint64_t kAllKills = 50;
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr uint64_t kKills = 15;  // starting is many times slower here
#else
constexpr uint64_t kKills = kAllKills;
#endif
constexpr uint64_t kAtStart = 5;          // every fifth kill hits the start of the program, the others a save
constexpr uint64_t kSteps = 16 * kKills;  // more steps than are completed between kills

class KillTest : public ProgramTest {
 protected:
  // Steps 1, 2, 3 and so on, each exactly once, up to at least `min_steps`.
  void expect_steps_in_order(int64_t min_steps) const {
    int64_t last = 0;
    for (const Json& record : records("run"))
      EXPECT_TRUE(record.at("event") != "step" || record.at("step") == ++last) << record;
    EXPECT_GE(last, min_steps);
  }

  void expect_same_records() const {
    EXPECT_EQ(records("run"), records("whole"));
    EXPECT_TRUE(read_file(path("run/metrics.jsonl")).ends_with("\n")) << "the last record is incomplete";
  }

  // Polls `condition` until it holds.
  template <class Condition>
  void wait_until(const Condition& condition) const {
    const auto end = Clock::now() + std::chrono::seconds(30);
    while (!condition()) {
      if (Clock::now() > end) {
        ADD_FAILURE() << "nothing was saved within 30 seconds: " << log();
        return;
      }
      std::this_thread::sleep_for(std::chrono::microseconds(20));
    }
  }
  void measure();
  void kill_and_check(uint64_t k);
  void expect_words_about(int64_t newest, const std::vector<std::string>& leftovers) const;

  const std::string options_ = fmt::format("--steps {} --channels 64 --batch 1 --dropout 0.1 --eval-every 25 ", kSteps);
  const Philox random_{50};
  double startup_ = 0, between_saves_ = 0, save_ = 0;  // seconds
  uint64_t while_saving_ = 0;
};

// Measures the duration of a start and of a save, which depend on disk and load.
void KillTest::measure() {
  constexpr int64_t kSaves = 10;
  const auto begin = Clock::now();
  const pid_t child = start("train " + kSmall + options_ + "--save-every 1 --out run");
  wait_until([&] { return newest_saved() >= 1; });
  const auto first = Clock::now();
  int looks = 0, saving_looks = 0;
  wait_until([&] {
    ++looks;
    saving_looks += saving(child);
    return newest_saved() >= 1 + kSaves;
  });
  between_saves_ = Seconds(Clock::now() - first).count() / kSaves;
  save_ = between_saves_ * saving_looks / looks;
  startup_ = Seconds(first - begin).count();
  kill(child, SIGKILL);
  waitpid(child, nullptr, 0);
  fs::remove_all(path("run"));
}

void KillTest::kill_and_check(uint64_t k) {
  const double fraction = static_cast<double>(random_.below(1000000, k)) / 1e6;
  const bool at_start = k % kAtStart == 0;
  const int64_t before = newest_step();
  const std::vector<std::string> leftovers = partial_files();
  const bool begun = fs::exists(path("run/config.toml"));
  const pid_t child =
      start(begun ? "train --resume --out run" : "train " + kSmall + options_ + "--save-every 1 --out run");
  if (at_start) {
    std::this_thread::sleep_for(Seconds(fraction * startup_));
  } else {
    wait_until([&] { return saving(child); });
    std::this_thread::sleep_for(Seconds(static_cast<double>(random_.below(3, kAllKills + k)) * between_saves_));
    wait_until([&] { return saving(child); });
    std::this_thread::sleep_for(Seconds(fraction * save_));
  }
  kill(child, SIGKILL);
  ASSERT_EQ(test::wait_for_exit(child), 1000) << "ended before it was killed: " << log();

  while_saving_ += saving(child);
  EXPECT_GE(newest_step(), before);
  expect_steps_in_order(newest_step());
  if (!at_start && begun) expect_words_about(before, leftovers);
}

// Checks the output of a process that got as far as saving: resumed step and removed files.
void KillTest::expect_words_about(int64_t newest, const std::vector<std::string>& leftovers) const {
  expect_has(log(), newest > 0 ? fmt::format("resuming after step {}\n", newest) : "starting at step 1\n");
  for (const std::string& name : leftovers) {
    expect_has(log(), "removed incomplete files of a killed run: " + name + "\n");
    EXPECT_FALSE(fs::exists(path(name))) << name;
  }
}

TEST_F(KillTest, RunKilledFiftyTimesMatchesUninterruptedRunBitwise) {
  const auto begin = Clock::now();
  measure();
  train(options_ + "--save-every 0 --out whole");

  for (uint64_t k = 0; k < kKills && !HasFailure(); ++k) kill_and_check(k);
  ASSERT_FALSE(HasFailure());
  const int64_t reached = newest_step();
  // On a disk two thirds or more of the kills hit a save; on a memory file system saves are too short to be hit often.
  EXPECT_GT(while_saving_, kKills / 4);
  must("train --resume --out run --save-every 0");

  const std::string end = fmt::format("checkpoints/step-{}", kSteps);
  EXPECT_EQ(weights("run/" + end), weights("whole/" + end));
  EXPECT_EQ(optimizer("run/" + end), optimizer("whole/" + end));
  EXPECT_EQ(read_file(path("run/checkpoints/latest")), fmt::format("step-{}\n", kSteps));
  expect_no_temporary("run");
  expect_same_records();
  if (const std::string why = test::tensorboard_missing(); why.empty())
    EXPECT_EQ(test::read_curves(path("run"), "shown"), test::recorded_curves(path("run")));
  else
    fmt::print("the event files were not read: {}\n", why);
  fmt::print("{} kills{}, {} of them while a checkpoint was written; {} steps done between them; {:.1f} s\n", kKills,
             kKills < kAllKills ? fmt::format(" (instead of {}: sanitizers are slow)", kAllKills) : "", while_saving_,
             reached, Seconds(Clock::now() - begin).count());
}

TEST_F(KillTest, RunKilledBeforeFirstCheckpointStartsAgain) {
  train("--out whole");
  // Killed while it wrote config.toml, its first file: a new run can reuse the name.
  fs::create_directories(path("run"));
  write_file(path("run/config.toml.tmp-999999999"), "seed = ");
  train("--out run");
  EXPECT_TRUE(partial_files().empty());
  // Killed in its first steps: recorded steps are repeated.
  fs::remove_all(checkpoints());
  expect_has(must("train --resume --out run").err, "no checkpoint yet: starting at step 1");
  EXPECT_EQ(weights("run/checkpoints/step-12"), weights("whole/checkpoints/step-12"));
  expect_same_records();
  // If all checkpoints are damaged, resuming fails.
  fs::remove(checkpoints() / "step-12/manifest.json");
  fails("train --resume --out run", 4, "run: no usable checkpoint: run/checkpoints/step-12");
}

// A soak test: short runs under random plans are killed, stopped, interrupted and stalled at random times, and resumed
// under other plans; one in five is the replay of an asynchronous server. Each finishes within its time limit, loses no
// checkpoint, and is finally bitwise identical to an uninterrupted run. Off unless TESSERA_SOAK sets the number of
// runs; TESSERA_SOAK_SEED selects others.

constexpr int64_t kSoakSteps = 60;
constexpr double kTimeout = 120;  // seconds; a run takes about one, but the machine may be busy

class SoakTest : public ProgramTest {
 protected:
  uint64_t below(uint64_t n) { return random_.below(n, samples_++); }
  double fraction() { return static_cast<double>(below(1000000)) / 1e6; }
  std::string of(const test::Plans& list) { return list[below(list.size())]; }
  static uint64_t number(const char* name, uint64_t otherwise) {
    const char* const text = std::getenv(name);
    return text ? std::strtoull(text, nullptr, 10) : otherwise;
  }

  // Waits until the next save, or until a time limit, because not every run saves.
  void await_saving(pid_t child) const {
    const auto begin = Clock::now();
    while (!saving(child) && Seconds(Clock::now() - begin).count() < duration_)
      std::this_thread::sleep_for(std::chrono::microseconds(50));
  }
  void disturb(pid_t child);
  void one_disturbed_run(const std::string& settings, const std::string& plan);
  void one_trial();
  // The final files of `settings` under the plan.
  std::string undisturbed(const std::string& settings, const std::string& plan);
  // A random asynchronous plan with its record in order.txt.
  test::Plans recorded(const std::string& settings);

  Philox random_{number("TESSERA_SOAK_SEED", 1)};
  uint64_t samples_ = 0;
  double duration_ = 1;  // approximate duration of a full run in seconds
  uint64_t runs_ = 0, trials_ = 0;
  int last_signal_ = 0;  // the last signal that ends a run
  std::string replay_;   // options of a trial with an asynchronous server
  std::string history_;  // the trial so far, for diagnosis
  std::map<std::string, std::string> ends_;
  std::map<std::string, uint64_t> outcomes_;
};

// Disturbs a run: it is stalled, then killed or asked to stop, once or twice.
void SoakTest::disturb(pid_t child) {
  if (below(2) == 0)
    await_saving(child);
  else
    std::this_thread::sleep_for(Seconds(fraction() * duration_));
  std::this_thread::sleep_for(Seconds(fraction() * 0.003));
  if (below(3) == 0) {
    kill(child, SIGSTOP);
    std::this_thread::sleep_for(Seconds(fraction() * 0.1));
    kill(child, SIGCONT);
    std::this_thread::sleep_for(Seconds(fraction() * 0.02));
    history_ += ", held up";
  }
  constexpr int kinds[] = {SIGKILL, SIGKILL, SIGTERM, SIGINT, 0};
  last_signal_ = kinds[below(std::size(kinds))];
  if (last_signal_ == 0) return;
  kill(child, last_signal_);
  history_ += fmt::format(", signal {}", last_signal_);
  if (last_signal_ == SIGKILL || below(4) > 0) return;
  std::this_thread::sleep_for(Seconds(fraction() * 0.02));
  kill(child, last_signal_);
  history_ += " twice";
}

void SoakTest::one_disturbed_run(const std::string& settings, const std::string& plan) {
  const bool begun = fs::exists(path("run/config.toml"));
  const int64_t before = begun ? newest_step() : 0;
  const std::string command = begun ? "train --resume --out run " + test::kNoPlan + plan
                                    : fmt::format("train {}{} {} --out run", kSmall, settings, plan);
  history_ += fmt::format("\n  after step {}: {}", before, plan);
  const pid_t child = start(command + replay_);
  disturb(child);
  int status = 0;
  ASSERT_TRUE(test::ends(child, status, kTimeout, SIGABRT)) << "did not end" << history_ << "\n" << log();
  ++runs_;
  const std::string log = this->log();
  if (WIFSIGNALED(status)) {
    EXPECT_EQ(WTERMSIG(status), last_signal_) << history_ << "\n" << log;
    ++outcomes_[fmt::format("ended by signal {}", WTERMSIG(status))];
  } else {
    const int code = WEXITSTATUS(status);
    EXPECT_TRUE(code == 0 || (last_signal_ != 0 && code == 128 + last_signal_)) << code << history_ << "\n" << log;
    ++outcomes_[fmt::format("status {}", code)];
    if (code > 128) {
      EXPECT_NE(log.find("stopped after step"), std::string::npos) << history_ << "\n" << log;
      EXPECT_GE(newest_step(), before + (replay_.empty() ? 1 : 0)) << history_;  // a replay advances push by push
    }
  }
  EXPECT_GE(newest_step(), before) << "a checkpoint was lost" << history_;
  if (before > 0) {
    EXPECT_TRUE(WIFSIGNALED(status) || log.find(fmt::format("resuming after step {}\n", before)) != std::string::npos)
        << history_ << "\n"
        << log;
  }
}

std::string SoakTest::undisturbed(const std::string& settings, const std::string& plan) {
  std::string& end = ends_[settings + plan];
  if (!end.empty()) return end;
  const auto begin = Clock::now();
  anew(fmt::format("train {}{} --save-every 0 {} --out whole", kSmall, settings, plan));
  duration_ = Seconds(Clock::now() - begin).count();
  return end = files(fmt::format("whole/checkpoints/step-{}", kSoakSteps));
}

test::Plans SoakTest::recorded(const std::string& settings) {
  const std::string plan = fmt::format("--dp-mode ps-async {} --staleness {}",
                                       of({"--ranks 2", "--ranks 4 --servers 2", "--ranks 4 --servers 3"}), below(4));
  const std::string recording = plan + " --record order.txt";
  ends_.erase(settings + recording);  // every record is a different run
  ends_[settings + plan] = undisturbed(settings, recording);
  return {plan};
}

void SoakTest::one_trial() {
  const test::Plans* const families[] = {&test::kTwoParts, &test::kTwoParts, &test::kFourInARow, &test::kTwoPairs};
  const bool asynchronous = below(5) == 0;
  const std::string settings = fmt::format("--steps {} --eval-every 25 --dropout 0.1 --timeout 60 {}", kSoakSteps,
                                           of({"", "--dtype bf16", "--optimizer sgd --lr 0.1 --momentum 0.9"}));
  const test::Plans plans = asynchronous ? recorded(settings) : *families[below(std::size(families))];
  replay_ = asynchronous ? " --replay order.txt" : "";
  const std::string end = undisturbed(settings, plans[0]);
  history_.clear();
  const std::string saving_too = fmt::format("{} --save-every {}", settings, of({"1", "1", "3", "20"}));
  const uint64_t disturbances = 1 + below(4);
  for (uint64_t k = 0; k < disturbances && !HasFailure(); ++k) one_disturbed_run(saving_too, of(plans));
  ASSERT_FALSE(HasFailure());
  const std::string plan = of(plans);
  const Ran last = fs::exists(path("run/config.toml"))
                       ? run("train --resume --out run " + test::kNoPlan + plan + replay_)
                       : train(fmt::format("{} {}{} --out run", saving_too, plan, replay_));
  ASSERT_EQ(last.status, 0) << history_ << "\n" << last.err;
  const std::string newest = fmt::format("run/checkpoints/step-{}", kSoakSteps);
  ASSERT_TRUE(files(newest) == end) << "different bits" << history_ << "\n  finally: " << plan;
  EXPECT_TRUE(partial_files().empty()) << partial_files().front() << history_;
  fs::remove_all(path("run"));
  ++trials_;
}

TEST_F(SoakTest, SurvivesRandomFaultsUnderRandomPlans) {
  const uint64_t wanted = number("TESSERA_SOAK", 0);
  if (wanted == 0) GTEST_SKIP() << "TESSERA_SOAK=1000 runs it";
  const auto begin = Clock::now();
  while (runs_ < wanted && !HasFailure()) {
    one_trial();
    if (trials_ % 20 == 0) fmt::print("{} disturbed runs, {} resumed to their end\n", runs_, trials_);
    std::fflush(stdout);
  }
  fmt::print("{} disturbed runs in {} chains, {:.0f} s\n", runs_, trials_, Seconds(Clock::now() - begin).count());
  for (const auto& [outcome, count] : outcomes_) fmt::print("  {}: {}\n", outcome, count);
}

}  // namespace
}  // namespace tessera
