// Checkpoint folders: whole or absent, whatever happens while they are written, and refused when they are damaged.
#include <signal.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include "data/safetensors.h"
#include "tensor/random.h"
#include "tests/train/checkpoints.h"

namespace tessera {
namespace {
namespace fs = std::filesystem;

class CheckpointTest : public Checkpoints {
 protected:
  // Two files whose bytes follow from the step.
  Checkpoint save(int64_t step, size_t keep = 9, size_t bytes = 3000) const {
    const auto content = [=](char ch) { return std::string(bytes, static_cast<char>(ch + step % 20)); };
    NewCheckpoint made(dir(), step);
    write_file(made.path() / "model.bin", content('a'));
    write_file(made.path() / "state.bin", content('A'));
    return made.finish(R"({"seed": 5})", keep);
  }
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

TEST_F(CheckpointTest, TheBestStays) {
  EXPECT_FALSE(best_checkpoint(dir()));
  save(10);
  write_best(dir(), {10, 1.5});
  for (const int64_t step : {20, 30, 40}) save(step, 2);
  EXPECT_EQ(names(), (std::vector<std::string>{"best", "latest", "step-10", "step-30", "step-40"}));
  EXPECT_EQ(best_checkpoint(dir())->val_loss, 1.5);
  write_best(dir(), {40, 1.25});
  save(50, 1);
  EXPECT_EQ(names(), (std::vector<std::string>{"best", "latest", "step-40", "step-50"}));
  fs::remove_all(dir() / "step-40");
  EXPECT_FALSE(best_checkpoint(dir())) << "it is no more";
}

// Several writers fill a file, each its own bytes, and all of it is the file that one writes.
TEST_F(CheckpointTest, AFileInPartsIsTheFileOfOneWriter) {
  fs::create_directories(dir());
  const std::string a(40, 'a'), b(24, 'b');
  const auto bytes = [](const std::string& s) { return std::as_bytes(std::span(s)); };
  const std::vector<TensorBytes> tensors = {{"x", DType::float32, {5, 2}, bytes(a)},
                                            {"y", DType::int64, {3}, bytes(b)}};
  write_safetensors(dir() / "one", tensors, {{"steps", "3"}});
  const SafetensorsLayout layout = safetensors_layout(tensors, {{"steps", "3"}});
  SharedFile::create(dir() / "parts", layout.header, layout.size);
  EXPECT_THROW(SharedFile::create(dir() / "parts", layout.header, layout.size), OutputError) << "it is there";
  const SharedFile first(dir() / "parts"), second(dir() / "parts");
  second.write(layout.begins.at("y"), bytes(b));
  first.write(layout.begins.at("x") + 8, bytes(a).subspan(8));
  second.write(layout.begins.at("x"), bytes(a).first(8));
  EXPECT_EQ(read_file(dir() / "parts"), read_file(dir() / "one"));
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
    expect_error(Status::input, {words}, [&] { open_checkpoint(newer); });
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
  damage("it lists no files", [](const fs::path& p) {
    write_file(p / "manifest.json", R"({"format":"tessera checkpoint","version":1,"step":1,"files":{},"about":{}})");
  });
  EXPECT_THROW(open_checkpoint(dir() / "step-99"), InputError);
}

TEST_F(CheckpointTest, AFailedSaveLeavesNothingAndKeepsTheEarlier) {
  save(10);
  const std::vector<std::string> before = names();
  {
    const NewCheckpoint given_up(dir(), 20);
    write_file(given_up.path() / "model.bin", "abc");
  }
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
