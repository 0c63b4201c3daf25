// A training run that is killed again and again, most times while it writes a checkpoint, and resumed after each: it
// loses nothing, leaves nothing half-written, and ends with the bits of a run that nobody disturbed.

#include "tensor/random.h"
#include "tests/app/curves.h"
#include "tests/app/program.h"

namespace tessera {
namespace {
namespace fs = std::filesystem;
using Json = nlohmann::json;
using Clock = std::chrono::steady_clock;
using Seconds = std::chrono::duration<double>;

constexpr uint64_t kAllKills = 50;
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr uint64_t kKills = 15;  // a start takes many times as long
#else
constexpr uint64_t kKills = kAllKills;
#endif
constexpr uint64_t kAtStart = 5;  // every fifth kill falls into the start of the program, the others into its saving
constexpr uint64_t kSteps = 16 * kKills;  // more than are done between the kills

class KillTest : public test::ProgramTest {
 protected:
  // The records of steps and validations without what depends on the time. Only a last line may be torn, and in the end
  // none.
  std::vector<Json> records(const std::string& run, bool ended) const {
    std::vector<Json> out;
    if (!fs::exists(path(run) / "metrics.jsonl")) return out;
    const std::string all = read_file(path(run) / "metrics.jsonl");
    size_t at = 0;
    for (size_t end; (end = all.find('\n', at)) != std::string::npos; at = end + 1) {
      Json record = Json::parse(all.substr(at, end - at));
      for (const char* key : {"tokens_per_s", "step_ms"}) record.erase(key);
      if (record.at("event") != "summary") out.push_back(record);
    }
    EXPECT_TRUE(at == all.size() || !ended) << all.substr(at);
    return out;
  }
  // Steps 1, 2, 3 and so on, each once, up to at least `least`.
  void expect_steps_in_order(int64_t least) const {
    int64_t last = 0;
    for (const Json& record : records("run", false)) {
      if (record.at("event") == "step") {
        EXPECT_EQ(record.at("step"), ++last);
      }
    }
    EXPECT_GE(last, least);
  }

  // Calls `condition` until it holds.
  template <class Condition>
  void wait_until(const Condition& condition) const {
    const auto end = Clock::now() + std::chrono::seconds(30);
    while (!condition()) {
      if (Clock::now() > end) {
        ADD_FAILURE() << "nothing was saved within 30 seconds: " << read_file(path("err.txt"));
        return;
      }
      std::this_thread::sleep_for(std::chrono::microseconds(20));
    }
  }
  void measure();
  void kill_and_check(uint64_t k);
  void expect_words_about(const std::string& log, int64_t newest, const std::vector<std::string>& leftovers) const;

  const std::string options_ = fmt::format("--steps {} --channels 64 --batch 1 --dropout 0.1 --eval-every 25 ", kSteps);
  const Philox random_{50};
  double startup_ = 0, between_saves_ = 0, save_ = 0;  // seconds
  uint64_t while_saving_ = 0;
};

// How long a start and a save take here: the disk and the load decide it.
void KillTest::measure() {
  constexpr int64_t kSaves = 10;
  const auto step_reached = [&](int64_t step) {
    return [this, step] {
      std::error_code error;
      const fs::path latest = checkpoints() / "latest";
      return fs::exists(latest, error) && std::stoll(read_file(latest).substr(5)) >= step;
    };
  };
  const auto begin = Clock::now();
  const pid_t child = start("train " + kSmall + options_ + "--save-every 1 --out run");
  wait_until(step_reached(1));
  const auto first = Clock::now();
  int looks = 0, saving_looks = 0;
  wait_until([&] {
    ++looks;
    saving_looks += saving(child);
    return step_reached(1 + kSaves)();
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
  const std::vector<std::string> leftovers = half_written();
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
  int status = 0;
  waitpid(child, &status, 0);
  const std::string log = read_file(path("err.txt"));
  ASSERT_TRUE(WIFSIGNALED(status)) << "it ended before it was killed: " << log;

  while_saving_ += saving(child);
  EXPECT_GE(newest_step(), before);
  expect_steps_in_order(newest_step());
  if (!at_start && begun) expect_words_about(log, before, leftovers);
}

// Checks the log of a process that came as far as saving: what it found, and what it removed.
void KillTest::expect_words_about(const std::string& log, int64_t newest,
                                  const std::vector<std::string>& leftovers) const {
  const std::string words = newest > 0 ? fmt::format("going on after step {}\n", newest) : "beginning at step 1\n";
  EXPECT_NE(log.find(words), std::string::npos) << words << ": " << log;
  for (const std::string& name : leftovers) {
    EXPECT_NE(log.find("removed what a killed run had left half-written: " + name + "\n"), std::string::npos) << log;
    EXPECT_FALSE(fs::exists(path(name))) << name;
  }
}

TEST_F(KillTest, ARunKilledAtFiftyMomentsEndsWithTheSameBits) {
  const auto begin = Clock::now();
  measure();
  ASSERT_EQ(train(options_ + "--save-every 0 --out whole").status, 0);

  for (uint64_t k = 0; k < kKills && !HasFailure(); ++k) kill_and_check(k);
  ASSERT_FALSE(HasFailure());
  const int64_t reached = newest_step();
  // Two thirds and more on a disk; a memory file system saves too fast to be aimed at.
  EXPECT_GT(while_saving_, kKills / 4);
  const test::Ran last = run("train --resume --out run --save-every 0");
  ASSERT_EQ(last.status, 0) << last.err;

  const std::string end = fmt::format("checkpoints/step-{}", kSteps);
  EXPECT_EQ(weights("run/" + end), weights("whole/" + end));
  EXPECT_EQ(optimizer("run/" + end), optimizer("whole/" + end));
  EXPECT_EQ(read_file(path("run/checkpoints/latest")), fmt::format("step-{}\n", kSteps));
  for (const auto& e : fs::recursive_directory_iterator(path("run")))
    EXPECT_EQ(e.path().filename().string().find(".tmp-"), std::string::npos) << e.path();
  EXPECT_EQ(records("run", true), records("whole", true));
  if (const std::string why = test::tensorboard_missing(); why.empty())
    EXPECT_EQ(test::read_curves(path("run"), "shown"), test::recorded_curves(path("run")));
  else
    fmt::print("the event files were not read: {}\n", why);
  fmt::print("{} kills{}, {} of them while a checkpoint was written; {} steps done between them; {:.1f} s\n", kKills,
             kKills < kAllKills ? fmt::format(" (instead of {}: sanitizers are slow)", kAllKills) : "", while_saving_,
             reached, Seconds(Clock::now() - begin).count());
}

TEST_F(KillTest, ARunKilledBeforeItsFirstCheckpointBeginsAgain) {
  ASSERT_EQ(train("--out whole").status, 0);
  // Killed while it wrote config.toml, its first file: the name can be taken by a new run.
  fs::create_directories(path("run"));
  write_file(path("run/config.toml.tmp-999999999"), "seed = ");
  ASSERT_EQ(train("--out run").status, 0);
  EXPECT_TRUE(half_written().empty());
  // Killed in its first steps: what was recorded is made again.
  fs::remove_all(checkpoints());
  const test::Ran r = run("train --resume --out run");
  ASSERT_EQ(r.status, 0) << r.err;
  EXPECT_NE(r.err.find("no checkpoint was saved yet: beginning at step 1"), std::string::npos) << r.err;
  EXPECT_EQ(weights("run/checkpoints/step-12"), weights("whole/checkpoints/step-12"));
  EXPECT_EQ(records("run", true), records("whole", true));
  // Checkpoints that are all damaged are another matter.
  fs::remove(checkpoints() / "step-12/manifest.json");
  expect_failure("train --resume --out run", 4, "run: no usable checkpoint: run/checkpoints/step-12");
}

}  // namespace
}  // namespace tessera
