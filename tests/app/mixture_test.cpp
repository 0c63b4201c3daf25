// Mixtures and shards as a user trains on them: what is said, the same files after a resume in the middle of an epoch
// and under another layout, and what is refused.
#include <nlohmann/json.hpp>

#include "tests/app/program.h"

namespace tessera {
namespace {
namespace fs = std::filesystem;
using Json = nlohmann::json;

class MixturesTest : public test::ProgramTest {
 protected:
  MixturesTest() { std::ofstream(path("more.txt")) << std::string(1500, '1') << " and other digits\n"; }
  // A mixture of bytes of two texts.
  const std::string kMixed = "--tokenizer bytes --data text.txt=0.7,more.txt=0.3 ";
};

TEST_F(MixturesTest, GoesOnAndIsLaidOutWithTheSameBits) {
  const test::Ran whole =
      train(kMixed + "--save-every 5 --eval-every 5 --ranks 1 --microbatches 2 --format json --out whole");
  ASSERT_EQ(whole.status, 0) << whole.err;
  EXPECT_NE(whole.err.find("a mixture of 2 datasets\n70% text.txt"), std::string::npos) << whole.err;
  EXPECT_NE(whole.err.find("30% more.txt"), std::string::npos) << whole.err;
  Json eval;
  for (size_t at = 0, end; (end = whole.out.find('\n', at)) != std::string::npos; at = end + 1)
    if (const Json record = Json::parse(whole.out.substr(at, end - at)); record["event"] == "eval") eval = record;
  EXPECT_NEAR(eval.at("val_loss").get<double>(),
              0.7 * eval.at("val_loss/text.txt").get<double>() + 0.3 * eval.at("val_loss/more.txt").get<double>(),
              1e-9);
  EXPECT_EQ(train(kMixed + "--save-every 5 --dp 2 --no-eval --format json --out run").status, 0);
  EXPECT_TRUE(weights("run/checkpoints/step-12") == weights("whole/checkpoints/step-12"));
  fs::remove_all(path("run/checkpoints/step-12"));
  const test::Ran resumed = run("train --resume --format json --out run");
  EXPECT_EQ(resumed.status, 0) << resumed.err;
  EXPECT_NE(resumed.err.find("going on after step 10\n"), std::string::npos) << resumed.err;
  EXPECT_TRUE(weights("run/checkpoints/step-12") == weights("whole/checkpoints/step-12"));
  EXPECT_TRUE(optimizer("run/checkpoints/step-12") == optimizer("whole/checkpoints/step-12"));
  // another mixture is another run, and so is another order
  fs::remove_all(path("run/checkpoints/step-12"));
  expect_failure("train --resume --out run --data text.txt=0.3,more.txt=0.7", 2, "mixture is \"3:7\" and was \"7:3\"");
  expect_failure("train --resume --out run --shuffle", 2, "shuffle is true and was as usual");
  const test::Ran evaluated = run("evaluate whole --data text.txt=7,more.txt=3 --format json");
  ASSERT_EQ(evaluated.status, 0) << evaluated.err;
  const Json found = Json::parse(evaluated.out), parts = found.at("datasets");
  EXPECT_NEAR(found.at("loss").get<double>(),
              0.7 * parts.at("text.txt").at("loss").get<double>() + 0.3 * parts.at("more.txt").at("loss").get<double>(),
              1e-6);
}

TEST_F(MixturesTest, ADatasetOfShards) {
  const test::Ran made = run("data 't*.txt' more.txt --tokenizer bytes --shard-tokens 10000 --out set");
  ASSERT_EQ(made.status, 0) << made.err;
  EXPECT_NE(made.out.find("in 4 files"), std::string::npos) << made.out;
  const test::Ran trained = train("--data set --steps 3 --no-save --out run");
  EXPECT_EQ(trained.status, 0) << trained.err;
  EXPECT_NE(trained.err.find(" in 4 files (bytes)"), std::string::npos) << trained.err;
  expect_failure("train --data set --model gpt-nano --context 20000 --ranks 1", 4, "expected at least 20001");
  fs::remove(path("set/train-00002.tok"));
  expect_failure("train --data set", 4, "train-00002.tok");
}

TEST_F(MixturesTest, WhatIsRefused) {
  expect_failure("train --data text.txt=1,more.txt=0", 2,
                 "--data: the weight of 'more.txt': expected a positive number");
  expect_failure("train --data text.txt=1,text.txt=2", 2, "'text.txt' is named twice");
  expect_failure("train --data text.txt=1", 2, "1 dataset with a weight");
  expect_failure("train --data text.txt=1,nowhere=1", 4, "nowhere");
  expect_failure("train --data text.txt=1,more.txt=1", 2, "another tokenizer (char,");
  expect_failure("train --data 'x*.bin'", 4, "no file matches");
  expect_failure("train --data text.txt=1,more.txt=1 --pack", 2, "--pack: goes with --data FILE.jsonl");
  expect_failure("data text.txt more.txt", 2, "--out: expected a folder for a dataset of 2 sources");
  expect_failure("data text.txt --shard-tokens 5", 2, "--shard-tokens: goes with --out");
}

}  // namespace
}  // namespace tessera
