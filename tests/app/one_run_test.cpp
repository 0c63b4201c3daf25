// One run, one folder: who writes to it, what it is the run of, and which checkpoints of it stay.

#include "tests/app/program.h"

namespace tessera {
namespace {
namespace fs = std::filesystem;

class OneRunTest : public test::ProgramTest {
 protected:
  // Starts the run in "run" and waits until it has made a step.
  pid_t begun(const std::string& more) const {
    const pid_t child = start("train " + kSmall + more + " --out run --quiet");
    for (int i = 0; i < 20000 && !fs::exists(path("run/metrics.jsonl")); ++i)
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    return child;
  }
  // One job of two processes, each with its own arguments and in its own folder. The shell chooses them by the rank:
  // mpirun of Debian 13 crashes where it is given two programs.
  test::Ran two_processes(const std::string& first, const std::string& second, const std::string& first_folder = ".",
                          const std::string& second_folder = ".") const {
    return run_program("mpirun",
                       fmt::format("--allow-run-as-root --oversubscribe -n 2 sh -c 'case $OMPI_COMM_WORLD_RANK "
                                   "in 0) cd {} && exec {} {};; *) cd {} && exec {} {};; esac'",
                                   first_folder, TESSERA_BINARY, first, second_folder, TESSERA_BINARY, second));
  }
  static int ended(pid_t child) {
    int status = 0;
    waitpid(child, &status, 0);
    return WIFEXITED(status) ? WEXITSTATUS(status) : 1000;
  }
};

TEST_F(OneRunTest, ASecondWriterIsRefusedAndADeadOneIsNone) {
  const pid_t child = begun("--steps 10000000 --save-every 0 --eval-every 0");
  const std::string owner = fmt::format("process {} on ", child);
  expect_failure("train --resume --out run", 2, owner);
  expect_failure("train " + kSmall + "--out run", 2, "holds a run already");
  kill(child, SIGSTOP);
  expect_failure("train --resume --out run", 2, owner);
  kill(child, SIGKILL);
  kill(child, SIGCONT);
  EXPECT_EQ(ended(child), 1000);
  EXPECT_EQ(run("train --resume --out run --steps 3 --warmup 1").status, 0);
}

TEST_F(OneRunTest, AFolderThatIsMovedEndsTheRun) {
  const pid_t child = begun("--steps 10000000 --save-every 5");
  fs::rename(path("run"), path("other"));
  EXPECT_EQ(ended(child), 6);
  EXPECT_NE(read_file(path("err.txt")).find("removed, moved or replaced"), std::string::npos);
  EXPECT_FALSE(fs::exists(path("run")));
  EXPECT_TRUE(fs::exists(path("other/config.toml")));
}

TEST_F(OneRunTest, MetricsThatAreRemovedEndTheRun) {
  const pid_t child = begun("--steps 10000000 --save-every 1000000");
  fs::remove(path("run/metrics.jsonl"));
  EXPECT_EQ(ended(child), 6);
  EXPECT_NE(read_file(path("err.txt")).find("metrics.jsonl: it was removed, moved or replaced"), std::string::npos);
}

TEST_F(OneRunTest, AnotherRunInItsPlaceIsNotTouched) {
  const pid_t child = begun("--steps 10000000 --save-every 1000000");
  fs::rename(path("run"), path("other"));
  fs::create_directories(path("run/checkpoints/step-1"));
  std::ofstream(path("run/lock")) << "of another";
  EXPECT_EQ(ended(child), 6);
  EXPECT_TRUE(fs::exists(path("run/checkpoints/step-1")));
  EXPECT_EQ(read_file(path("run/lock")), "of another");
}

// The same ids, another alphabet; and the same training text, another end.
TEST_F(OneRunTest, AnotherTextIsRefusedThoughItsIdsAreTheSame) {
  ASSERT_EQ(train("--steps 4 --out run").status, 0);
  const std::string text = read_file(path("text.txt")),
                    tokenizer = read_file(path("run/checkpoints/step-4/tokenizer.json"));
  std::string shifted = text, tail = text;
  for (char& c : shifted)
    if (c >= 'a' && c <= 'y') ++c;
  for (size_t i = tail.size() - 200; i < tail.size(); ++i)
    if (tail[i] == 'l') tail[i] = 's';
  std::ofstream(path("text.txt")) << shifted;
  expect_failure("train --resume --out run --steps 8", 2, "vocabulary is");
  std::ofstream(path("text.txt")) << tail;
  expect_failure("train --resume --out run --steps 8", 2, "validation is");
  EXPECT_EQ(read_file(path("run/checkpoints/step-4/tokenizer.json")), tokenizer);
  std::ofstream(path("text.txt")) << text;
  EXPECT_EQ(run("train --resume --out run --steps 8").status, 0);
}

TEST_F(OneRunTest, TheNewestAndTheBestStay) {
  const auto ran = train("--steps 60 --lr 0.5 --min-lr 0.5 --save-every 10 --eval-every 10 --keep 3 --out run");
  ASSERT_EQ(ran.status, 0) << ran.err;
  const std::optional<BestCheckpoint> best = best_checkpoint(checkpoints());
  ASSERT_TRUE(best);
  size_t kept = 0;
  for (const auto& e : fs::directory_iterator(checkpoints())) kept += e.path().filename().string().starts_with("step-");
  EXPECT_EQ(kept, best->step < 40 ? 4U : 3U);
  EXPECT_EQ(newest_step(), 60);
  double lowest = 1e9;
  std::ifstream records(path("run/metrics.jsonl"));
  for (std::string line; std::getline(records, line);)
    if (const size_t at = line.find("\"val_loss\":");
        at != std::string::npos && line.find("\"eval\"") != std::string::npos)
      lowest = std::min(lowest, std::stod(line.substr(at + 11)));
  EXPECT_NEAR(best->val_loss, lowest, 1e-6);
  EXPECT_EQ(run("generate run/checkpoints/best --tokens 3").status, 0);
}

// The last update makes infinities of finite gradients: there is no later step whose loss would show it.
TEST_F(OneRunTest, WeightsThatAreNotFiniteAreNotSaved) {
  const std::string huge = "--optimizer sgd --clip 0 --momentum 0 --warmup 0 --lr 1e300 --min-lr 1e300 ";
  expect_failure("train " + kSmall + huge + "--steps 1 --save-every 1 --out run", 5,
                 "holds inf or nan after the update");
  EXPECT_TRUE(!fs::exists(checkpoints()) || fs::is_empty(checkpoints()));
}

TEST_F(OneRunTest, APoisonedCheckpointIsPassedOver) {
  ASSERT_EQ(train("--steps 8 --save-every 4 --out run").status, 0);
  const fs::path model = checkpoints() / "step-8/model.safetensors";
  std::string bytes = read_file(model);
  const uint32_t nan = 0x7fc00000;
  bytes.replace(bytes.size() - 4, 4, reinterpret_cast<const char*>(&nan), 4);
  std::ofstream(model, std::ios::binary) << bytes;
  std::string manifest = read_file(checkpoints() / "step-8/manifest.json");
  const size_t at = manifest.find("\"xxh3\": \"", manifest.find("model.safetensors")) + 9;
  manifest.replace(at, 16, fmt::format("{:016x}", checksum(bytes)));
  std::ofstream(checkpoints() / "step-8/manifest.json") << manifest;
  expect_failure("generate run/checkpoints/step-8 --tokens 3", 4, "holds inf or nan at element");
  const auto resumed = run("train --resume --out run --steps 10");
  EXPECT_EQ(resumed.status, 0) << resumed.err;
  EXPECT_NE(resumed.err.find("passed over a checkpoint: "), std::string::npos) << resumed.err;
  EXPECT_NE(resumed.err.find("going on after step 4"), std::string::npos) << resumed.err;
}

// Every rank writes its own part while the next steps are made; the file is that of one rank all the same.
TEST_F(OneRunTest, SavesInTheBackgroundAreThoseOfOneRank) {
  const std::string often = "--steps 40 --save-every 3 --keep 20 --microbatches 4 --layers 2 ";
  ASSERT_EQ(train(often + "--ranks 1 --tie-copies --out one").status, 0);
  for (const char* plan :
       {"--pp 2 --dp 1", "--zero 3 --dp 2 --microbatches 2 --check-replicas 1", "--dp 2 --microbatches 2"}) {
    const auto ran = train(often + plan + " --tie-copies --out run");
    ASSERT_EQ(ran.status, 0) << ran.err;
    for (int step = 3; step < 40; step += 3) {
      const std::string name = fmt::format("checkpoints/step-{}", step);
      if (std::string(plan).starts_with("--pp")) {
        EXPECT_EQ(weights("run/" + name), weights("one/" + name)) << plan << step;
        EXPECT_EQ(optimizer("run/" + name), optimizer("one/" + name)) << plan << step;
      }
      EXPECT_NO_THROW(open_checkpoint(path("run/" + name))) << plan << step;
    }
    EXPECT_EQ(half_written(), std::vector<std::string>());
    fs::remove_all(path("run"));
  }
}

#if TESSERA_WITH_MPI
TEST_F(OneRunTest, ARankThatNeverBeginsEndsTheJob) {
  const test::Ran r = run_program(
      "mpirun",
      fmt::format("--allow-run-as-root --oversubscribe -n 2 sh -c 'test $OMPI_COMM_WORLD_RANK = 0 || kill -STOP "
                  "$$; exec {} train {} --timeout 2'",
                  TESSERA_BINARY, kSmall));
  EXPECT_EQ(r.status, 3);
  EXPECT_NE(r.err.find("tessera: [rank 0] MPI_Init: the others did not come within 2 s"), std::string::npos) << r.err;
}

TEST_F(OneRunTest, ProcessesThatWereToldOtherThingsDoNotTrain) {
  const std::string all = "train " + kSmall + "--out run ";
  const auto refused = [&](const std::string& first, const std::string& second, const std::string& words) {
    const auto ran = two_processes(first, second);
    EXPECT_EQ(ran.status, 2) << first << ran.err;
    EXPECT_NE(ran.err.find(words), std::string::npos) << ran.err;
    EXPECT_FALSE(fs::exists(path("run"))) << words;
    fs::remove_all(path("run"));
  };
  refused(all + "--seed 1", all + "--seed 2", "--seed is 1 on rank 0 and 2 on rank 1");
  refused(all, all + "--lr 0.5", "--lr is 0.03 on rank 0 and 0.5 on rank 1");
  refused(all, all + "--microbatches 2", "--microbatches is 1 on rank 0 and 2 on rank 1");
  refused("verify --steps 2", "verify --steps 3", "--steps is 2 on rank 0 and 3 on rank 1");
  refused("verify --steps 2", "report nothing", "only train, verify, generate, evaluate and bench");
  EXPECT_EQ(two_processes(all, all).status, 0);
}

TEST_F(OneRunTest, ProcessesInOtherFoldersDoNotTrain) {
  const std::string text = read_file(path("text.txt"));
  for (const char* folder : {"a", "b"}) {
    fs::create_directories(path(folder));
    std::ofstream(path(folder) / "text.txt") << text;
  }
  const auto ran_in = [&](const std::string& a, const std::string& b, const std::string& more) {
    const std::string all = "train " + kSmall + "--save-every 4 " + more;
    return two_processes(all, all, a, b);
  };
  const auto apart = ran_in(path("a"), path("b"), "--out run");
  EXPECT_EQ(apart.status, 2) << apart.err;
  EXPECT_NE(apart.err.find("folder of the run` is that of process"), std::string::npos) << apart.err;
  std::string other = text;
  other[5] = other[5] == '1' ? '2' : '1';
  std::ofstream(path("b") / "text.txt") << other;
  const auto data = ran_in(path("a"), path("b"), "--out " + path("run").string());
  EXPECT_EQ(data.status, 2) << data.err;
  EXPECT_NE(data.err.find("--data is "), std::string::npos) << data.err;
}
#endif

}  // namespace
}  // namespace tessera
