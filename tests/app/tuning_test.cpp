// Training on examples, as a user does it.
#include <fstream>

#include "tests/app/program.h"

namespace tessera {
namespace {
namespace fs = std::filesystem;

class TuningTest : public test::ProgramTest {
 protected:
  TuningTest() {
    std::ofstream file(path("sums.jsonl"));
    for (int i = 0; i < 60; ++i)
      file << fmt::format(R"({{"prompt": "{} and {} are ", "completion": "{}"}})", i, i % 7, i + i % 7) << "\n";
  }
  const std::string small_ =
      "train --data sums.jsonl --layers 2 --heads 2 --channels 16 --context 32 --batch 8 --microbatches 2 --steps 12 "
      "--warmup 2 --threads-per-rank 1 --tie-copies ";
};

TEST_F(TuningTest, EveryPlanWritesTheCheckpointOfOneRank) {
  for (const std::string more : {"", "--pack "}) {
    const auto one = run(small_ + more + "--ranks 1 --out one");
    ASSERT_EQ(one.status, 0) << one.err;
    EXPECT_NE(one.err.find("54 examples"), std::string::npos) << one.err;
    EXPECT_EQ(run(small_ + more + "--pp 2 --dp 1 --out two").status, 0);
    EXPECT_EQ(weights("two/checkpoints/step-12"), weights("one/checkpoints/step-12")) << more;
    fs::remove_all(path("one")), fs::remove_all(path("two"));
  }
}

// Where the order of sums is another one the losses are the same but for rounding.
TEST_F(TuningTest, LossesAreThoseOfOneRank) {
  const auto last_loss = [&](const std::string& plan) {
    const auto ran = run(small_ + "--pack --out run " + plan);
    EXPECT_EQ(ran.status, 0) << plan << ran.err;
    const std::string all = read_file(path("run/metrics.jsonl"));
    fs::remove_all(path("run"));
    return std::stod(all.substr(all.rfind("\"loss\":") + 7));
  };
  const double one = last_loss("--ranks 1");
  for (const char* plan : {"--dp 2 --zero 3", "--dp 1 --tp 2 --sp", "--dp 1 --cp 2"})
    EXPECT_NEAR(last_loss(plan), one, 1e-4 * one) << plan;
}

TEST_F(TuningTest, ARunIsPickedUpInItsOrder) {
  ASSERT_EQ(run(small_ + "--pack --ranks 1 --out whole").status, 0);
  ASSERT_EQ(run(small_ + "--pack --ranks 1 --out part --steps 12 --save-every 5").status, 0);
  fs::remove_all(path("part/checkpoints/step-12"));
  ASSERT_EQ(run("train --resume --out part").status, 0);
  EXPECT_EQ(weights("part/checkpoints/step-12"), weights("whole/checkpoints/step-12"));
}

TEST_F(TuningTest, MistakesAreNamed) {
  std::ofstream(path("bad.jsonl")) << R"({"prompt": "a", "completion": "b"})"
                                   << "\n"
                                   << R"({"prompt": "a"})"
                                   << "\n";
  expect_failure("train --data bad.jsonl --out run", 4, "bad.jsonl:2: expected messages, prompt and completion");
  expect_failure("train --data bad.jsonl --skip-bad --out run", 4, "expected at least 2");
  expect_failure("train --data text.txt --pack --out run", 2, "--pack: goes with --data FILE.jsonl");
  expect_failure(small_ + "--context 8 --out run", 4, "no token to train on");
  expect_failure(small_ + "--dp-mode ps-async --ranks 2 --out run", 2, "--dp-mode");
  expect_failure(small_ + "--template alpha --out run", 2, "--template");
  EXPECT_FALSE(fs::exists(path("run")));
}

}  // namespace
}  // namespace tessera
