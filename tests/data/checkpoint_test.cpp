// Checkpoint folders: whole or absent, whatever happens while they are written, and refused when they are damaged.
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <fstream>

#include "data/checkpoint_dir.h"
#include "data/files.h"
#include "tensor/error.h"
#include "tensor/random.h"

namespace tessera {
namespace {
namespace fs = std::filesystem;

class CheckpointTest : public testing::Test {
 protected:
  // Two files whose bytes follow from the step.
  Checkpoint save(int64_t step, size_t keep = 9, size_t bytes = 3000) const {
    const auto content = [=](char c) { return std::string(bytes, static_cast<char>(c + step % 20)); };
    const std::vector<CheckpointFile> files = {{"model.bin", [=](const fs::path& f) { write_file(f, content('a')); }},
                                               {"state.bin", [=](const fs::path& f) { write_file(f, content('A')); }}};
    return save_checkpoint(dir(), step, files, R"({"seed": 5})", keep);
  }
  fs::path dir() const { return folder_.path() / "checkpoints"; }
  std::optional<Checkpoint> newest() {
    passed_over_.clear();
    return newest_checkpoint(dir(), passed_over_);
  }
  std::vector<std::string> names() const {
    std::vector<std::string> out;
    for (const auto& e : fs::directory_iterator(dir())) out.push_back(e.path().filename().string());
    std::sort(out.begin(), out.end());
    return out;
  }
  TemporaryDirectory folder_{fs::temp_directory_path() / "tessera-checkpoint-"};
  std::vector<std::string> passed_over_;
};

TEST_F(CheckpointTest, TheNewestIsFoundAndOldOnesGo) {
  EXPECT_FALSE(newest());
  for (const int64_t step : {5, 100, 20}) save(step);
  EXPECT_EQ(newest()->step, 100);  // by number, not by name or time
  EXPECT_EQ(newest()->about, R"({"seed":5})");
  EXPECT_EQ(read_file(newest()->path / "model.bin"), std::string(3000, 'a'));
  EXPECT_EQ(read_file(dir() / "latest"), "step-20\n");
  save(200, 2);
  EXPECT_EQ(names(), (std::vector<std::string>{"latest", "step-100", "step-200"}));
}

TEST_F(CheckpointTest, ATakenNameIsReplacedAndAFileThereIsAnError) {
  save(7, 9, 10);
  save(7, 9, 20);
  EXPECT_EQ(fs::file_size(newest()->path / "model.bin"), 20U);
  EXPECT_EQ(names(), (std::vector<std::string>{"latest", "step-7"}));
  std::ofstream(dir() / "step-8") << "x";
  EXPECT_THROW(save(8), OutputError);
  EXPECT_EQ(names(), (std::vector<std::string>{"latest", "step-7", "step-8"}));
  EXPECT_EQ(newest()->step, 7);
}

TEST_F(CheckpointTest, DamageIsRefusedByNameAndPassedOver) {
  const auto damage = [&](const std::string& words, const std::function<void(const fs::path&)>& f) {
    save(10);
    const fs::path newer = save(20).path;
    f(newer);
    try {
      open_checkpoint(newer);
      ADD_FAILURE() << "accepted; expected " << words;
    } catch (const InputError& e) {
      EXPECT_NE(std::string(e.what()).find(words), std::string::npos) << e.what();
    }
    EXPECT_EQ(newest()->step, 10);
    ASSERT_EQ(passed_over_.size(), 1U);
    EXPECT_NE(passed_over_[0].find(words), std::string::npos);
    fs::remove_all(dir());
  };
  damage("model.bin", [](const fs::path& p) { fs::resize_file(p / "model.bin", 2999); });
  damage("state.bin", [](const fs::path& p) {
    std::fstream f(p / "state.bin", std::ios::in | std::ios::out | std::ios::binary);
    f.seekg(1234);
    const char c = static_cast<char>(f.get() ^ 4);  // one bit
    f.seekp(1234);
    f.put(c);
  });
  damage("model.bin", [](const fs::path& p) { fs::remove(p / "model.bin"); });
  damage("manifest.json", [](const fs::path& p) { fs::remove(p / "manifest.json"); });
  damage("manifest.json", [](const fs::path& p) { fs::resize_file(p / "manifest.json", 50); });
  damage("version",
         [](const fs::path& p) { write_file(p / "manifest.json", R"({"format":"tessera checkpoint","version":2})"); });
  damage("not a checkpoint", [](const fs::path& p) { write_file(p / "manifest.json", "[]"); });
  EXPECT_THROW(open_checkpoint(dir() / "step-99"), InputError);
}

TEST_F(CheckpointTest, AFailedSaveLeavesNothingAndKeepsTheEarlier) {
  save(10);
  const std::vector<std::string> before = names();
  const std::vector<CheckpointFile> files = {
      {"model.bin", [](const fs::path& f) { write_file(f, "abc"); }},
      {"state.bin", [](const fs::path&) { throw OutputError("the disk is full"); }}};
  EXPECT_THROW(save_checkpoint(dir(), 20, files, "{}", 1), OutputError);
  EXPECT_EQ(names(), before);
  EXPECT_EQ(newest()->step, 10);
}

// A limit on the size of files stands in for a full disk: the write fails in its middle.
TEST_F(CheckpointTest, AFullDiskIsAnErrorThatNamesTheFile) {
  save(10, 9, 1000);
  const pid_t child = fork();
  if (child == 0) {
    signal(SIGXFSZ, SIG_IGN);
    const rlimit limit{2000, 2000};
    setrlimit(RLIMIT_FSIZE, &limit);
    int status = 1;
    try {
      save(20, 1, 100000);
    } catch (const OutputError& e) {
      status = std::string(e.what()).find("model.bin") != std::string::npos ? 0 : 2;
    }
    _exit(status);
  }
  int status = 0;
  waitpid(child, &status, 0);
  EXPECT_EQ(status, 0);
  EXPECT_EQ(names(), (std::vector<std::string>{"latest", "step-10"}));
  EXPECT_EQ(newest()->step, 10);
}

// Killed at random moments while it saves again and again: what is found always opens, and the leftovers are removed.
TEST_F(CheckpointTest, AKillAtAnyMomentLeavesAWholeCheckpoint) {
  save(1, 2, 200000);
  const Philox random(8);
  int unfinished = 0;
  for (uint64_t round = 0; round < 25; ++round) {
    const int64_t from = newest()->step;
    const pid_t child = fork();
    if (child == 0) {
      for (int64_t step = from + 1;; ++step) save(step, 2, 200000);
    }
    usleep(static_cast<useconds_t>(1000 + random.below(25000, round)));
    kill(child, SIGKILL);
    waitpid(child, nullptr, 0);
    const std::optional<Checkpoint> found = newest();
    ASSERT_TRUE(found);
    EXPECT_TRUE(passed_over_.empty()) << passed_over_[0];
    EXPECT_GE(found->step, from);
    for (const std::string& name : names()) unfinished += name.find(".tmp-") != std::string::npos;
    remove_stale(dir(), true);
  }
  for (const std::string& name : names()) EXPECT_EQ(name.find(".tmp-"), std::string::npos) << name;
  EXPECT_GT(unfinished, 0);
}

// This process has begun none, so one under its number is of a dead process that had the same.
TEST_F(CheckpointTest, AttemptsOfOtherLivingProcessesStay) {
  save(1);
  const pid_t living = fork();
  if (living == 0) {
    for (;;) pause();
  }
  const fs::path theirs = dir() / ("step-5.tmp-" + std::to_string(living)), dead = dir() / "step-6.tmp-999999999",
                 ours = dir() / ("step-7.tmp-" + std::to_string(getpid()));
  for (const fs::path& attempt : {theirs, dead, ours}) fs::create_directories(attempt);
  std::vector<fs::path> removed = remove_stale(dir(), true);
  std::sort(removed.begin(), removed.end());
  EXPECT_EQ(removed, (std::vector<fs::path>{dead, ours}));
  EXPECT_TRUE(fs::exists(theirs));
  EXPECT_FALSE(fs::exists(dead) || fs::exists(ours));
  EXPECT_EQ(newest()->step, 1);
  kill(living, SIGKILL);
  waitpid(living, nullptr, 0);
  EXPECT_EQ(remove_stale(dir(), true), (std::vector<fs::path>{theirs}));
}

}  // namespace
}  // namespace tessera
