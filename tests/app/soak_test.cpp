// A soak: short runs under random plans that are killed, stopped, interrupted and held up at random moments, and
// resumed under other plans; one in five is the replay of an asynchronous server, and resumed as such. Each ends within
// its time, loses no checkpoint, and in the end has the bits of a run that nobody disturbed. Off unless TESSERA_SOAK
// says how many disturbed runs there shall be; TESSERA_SOAK_SEED draws others.

#include <cstdio>
#include <iterator>
#include <map>

#include "tensor/random.h"
#include "tests/app/layouts.h"
#include "tests/app/program.h"

namespace tessera {
namespace {
namespace fs = std::filesystem;
using Clock = std::chrono::steady_clock;
using Seconds = std::chrono::duration<double>;

constexpr int64_t kSteps = 60;
constexpr double kTimeout = 120;  // seconds for a run that takes one; the machine may be busy

class SoakTest : public test::ProgramTest {
 protected:
  uint64_t below(uint64_t n) { return random_.below(n, draws_++); }
  double fraction() { return static_cast<double>(below(1000000)) / 1e6; }
  std::string of(const test::Plans& list) { return list[below(list.size())]; }
  static uint64_t number(const char* name, uint64_t otherwise) {
    const char* const text = std::getenv(name);
    return text ? std::strtoull(text, nullptr, 10) : otherwise;
  }

  // Waits for the end; true when it came in time.
  bool ends(pid_t child, int& status) const {
    const auto begin = Clock::now();
    while (waitpid(child, &status, WNOHANG) == 0) {
      if (Seconds(Clock::now() - begin).count() > kTimeout) {
        kill(child, SIGABRT);
        waitpid(child, &status, 0);
        return false;
      }
      std::this_thread::sleep_for(std::chrono::milliseconds(2));
    }
    return true;
  }
  // Until it saves, or a while has gone by: not every run does.
  void await_saving(pid_t child) const {
    const auto begin = Clock::now();
    while (!saving(child) && Seconds(Clock::now() - begin).count() < duration_)
      std::this_thread::sleep_for(std::chrono::microseconds(50));
  }
  void disturb(pid_t child);
  void one_disturbed_run(const std::string& settings, const std::string& plan);
  void one_trial();
  // The files that `settings` end with under the plan.
  std::string undisturbed(const std::string& settings, const std::string& plan);
  // An asynchronous plan, and its record in order.txt.
  test::Plans recorded(const std::string& settings);

  Philox random_{number("TESSERA_SOAK_SEED", 1)};
  uint64_t draws_ = 0;
  double duration_ = 1;  // seconds of a whole run, about
  uint64_t runs_ = 0, trials_ = 0;
  int last_signal_ = 0;  // the last that was sent which ends a run
  std::string replay_;   // the option of a trial with an asynchronous server
  std::string history_;  // the trial so far, for whoever wants to know how it went wrong
  std::map<std::string, std::string> ends_;
  std::map<std::string, uint64_t> outcomes_;
};

// Disturbs a run: it is held up, then killed or asked to stop, once or twice.
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
  ASSERT_TRUE(ends(child, status)) << "it did not end" << history_ << "\n" << read_file(path("err.txt"));
  ++runs_;
  const std::string log = read_file(path("err.txt"));
  if (WIFSIGNALED(status)) {
    EXPECT_EQ(WTERMSIG(status), last_signal_) << history_ << "\n" << log;
    ++outcomes_[fmt::format("ended by signal {}", WTERMSIG(status))];
  } else {
    const int code = WEXITSTATUS(status);
    EXPECT_TRUE(code == 0 || (last_signal_ != 0 && code == 128 + last_signal_)) << code << history_ << "\n" << log;
    ++outcomes_[fmt::format("status {}", code)];
    if (code > 128) {
      EXPECT_NE(log.find("stopped after step"), std::string::npos) << history_ << "\n" << log;
      EXPECT_GE(newest_step(), before + (replay_.empty() ? 1 : 0)) << history_;  // a replay goes on push by push
    }
  }
  EXPECT_GE(newest_step(), before) << "a checkpoint was lost" << history_;
  if (before > 0) {
    EXPECT_TRUE(WIFSIGNALED(status) || log.find(fmt::format("going on after step {}\n", before)) != std::string::npos)
        << history_ << "\n"
        << log;
  }
}

std::string SoakTest::undisturbed(const std::string& settings, const std::string& plan) {
  std::string& end = ends_[settings + plan];
  if (!end.empty()) return end;
  const auto begin = Clock::now();
  EXPECT_EQ(train(fmt::format("{} --save-every 0 {} --out whole", settings, plan)).status, 0);
  duration_ = Seconds(Clock::now() - begin).count();
  const std::string last = fmt::format("whole/checkpoints/step-{}", kSteps);
  end = weights(last) + optimizer(last);
  fs::remove_all(path("whole"));
  return end;
}

test::Plans SoakTest::recorded(const std::string& settings) {
  const std::string plan = fmt::format("--dp-mode ps-async {} --staleness {}",
                                       of({"--ranks 2", "--ranks 4 --servers 2", "--ranks 4 --servers 3"}), below(4));
  const std::string recording = plan + " --record order.txt";
  ends_.erase(settings + recording);  // every record is another run
  ends_[settings + plan] = undisturbed(settings, recording);
  return {plan};
}

void SoakTest::one_trial() {
  const test::Plans* const families[] = {&test::kTwoParts, &test::kTwoParts, &test::kFourInARow, &test::kTwoPairs};
  const bool asynchronous = below(5) == 0;
  const std::string settings = fmt::format("--steps {} --eval-every 25 --dropout 0.1 --timeout 60 {}", kSteps,
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
  const test::Ran last = fs::exists(path("run/config.toml"))
                             ? run("train --resume --out run " + test::kNoPlan + plan + replay_)
                             : train(fmt::format("{} {}{} --out run", saving_too, plan, replay_));
  ASSERT_EQ(last.status, 0) << history_ << "\n" << last.err;
  const std::string newest = fmt::format("run/checkpoints/step-{}", kSteps);
  ASSERT_TRUE(weights(newest) + optimizer(newest) == end) << "other bits" << history_ << "\n  at last: " << plan;
  EXPECT_TRUE(half_written().empty()) << half_written().front() << history_;
  fs::remove_all(path("run"));
  ++trials_;
}

TEST_F(SoakTest, RandomPlansAndRandomFaults) {
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
