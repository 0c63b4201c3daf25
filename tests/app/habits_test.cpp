// Numbers as people say them: epochs and shares in place of steps, another file to validate on, an end by patience.
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "tests/app/program.h"

namespace tessera {
namespace {

class HabitsTest : public test::ProgramTest {
 protected:
  std::string config() const { return read_file(path("run/config.toml")); }
  std::vector<int64_t> validated() const {
    std::vector<int64_t> steps;
    std::ifstream records(path("run/metrics.jsonl"));
    for (std::string line; std::getline(records, line);)
      if (const auto j = nlohmann::json::parse(line); j["event"] == "eval") steps.push_back(j["step"]);
    return steps;
  }
};

TEST_F(HabitsTest, EpochsAndSharesAreSteps) {
  std::ofstream rows(path("rows.jsonl"));  // 30 to train on, 4 to a step: 7.5 steps an epoch
  for (int i = 0; i < 33; ++i) rows << fmt::format(R"({{"prompt": "{} and", "completion": " {}"}})", i, i * i) << "\n";
  rows.close();
  const std::string model =
      "train --data rows.jsonl --model gpt-nano --layers 1 --channels 16 --context 16 --batch 4 "
      "--tokenizer bytes --threads-per-rank 1 --lr 0.02 ";
  for (const char* plan : {"--ranks 1 ", "--ranks 2 --zero 1 "}) {
    std::filesystem::remove_all(path("run"));
    std::filesystem::remove_all(path("told"));
    const auto r =
        run(model + plan + "--epochs 2 --eval-every 0.5e --save-every 1e --warmup 20% --min-lr 5% --out run");
    ASSERT_EQ(r.status, 0) << r.err;
    for (const char* line :
         {"steps = 15\n", "eval-every = 4\n", "save-every = 8\n", "warmup = \"20%\"\n", "min-lr = \"5%\"\n"})
      EXPECT_NE(config().find(line), std::string::npos) << line << config();
    EXPECT_EQ(config().find("epochs"), std::string::npos);
    EXPECT_EQ(validated(), (std::vector<int64_t>{4, 8, 12, 15}));
    const auto told = run(model + plan + "--steps 15 --eval-every 4 --warmup 3 --min-lr 0.001 --out told");
    ASSERT_EQ(told.status, 0) << told.err;
    EXPECT_EQ(weights("run/checkpoints/step-15"), weights("told/checkpoints/step-15"));
    const auto more = run("train --resume --out run --config run/config.toml --epochs 3");  // shares hold on
    ASSERT_EQ(more.status, 0) << more.err;
    EXPECT_NE(config().find("steps = 23\n"), std::string::npos) << config();
  }
  expect_failure(model + "--epochs 2 --steps 3", 2, "--epochs: expected no --steps");
  // A later word, or one of the command line, is in the place of what a file says.
  EXPECT_EQ(run("train --config run/config.toml --epochs 0.5 --out half").status, 0);
  EXPECT_NE(read_file(path("half/config.toml")).find("steps = 4\n"), std::string::npos);
  std::ofstream(path("epochs.toml")) << "epochs = 2.0\n";
  EXPECT_EQ(run(model + "--config epochs.toml --steps 1 --no-eval --out one").status, 0);
  expect_failure(model + "--warmup 101%", 2, "--warmup: expected a number in [0, 100], found '101'");
  expect_failure(model + "--warmup 3e", 2, "--warmup: expected a whole number");
  std::filesystem::copy_file(path("text.txt"), path("other.txt"));
  expect_failure("train --data other.txt=1,text.txt=1 --epochs 1 --tokenizer bytes", 2,
                 "--epochs: expected one source");
}

TEST_F(HabitsTest, PatienceEndsARunAlsoOneThatIsResumed) {
  const std::string still = "--lr 0 --eval-every 2 --out run ";  // no validation is better than the first
  const auto r = train(still + "--steps 40 --patience 2");
  ASSERT_EQ(r.status, 0) << r.err;
  EXPECT_NE(r.err.find("2 validations without a better loss (--patience): the run ends after step 6 of 40"),
            std::string::npos)
      << r.err;
  EXPECT_EQ(validated(), (std::vector<int64_t>{2, 4, 6}));
  EXPECT_TRUE(std::filesystem::exists(path("run/checkpoints/step-6")));
  std::filesystem::remove_all(path("run"));
  ASSERT_EQ(train(still + "--steps 4").status, 0);
  const auto more = run("train --resume --out run --config run/config.toml --steps 40 --patience 2");
  ASSERT_EQ(more.status, 0) << more.err;
  EXPECT_EQ(validated(), (std::vector<int64_t>{2, 4, 6}));
  expect_failure("train --patience 2 --eval-every 0", 2, "--patience: expected validations between steps, found");
  expect_failure("train --patience 2 --no-eval", 2, "--patience: expected validations between steps, found --no-eval");
}

TEST_F(HabitsTest, AFileOrAShareIsHeldOut) {
  std::ofstream(path("other.txt")) << std::string(700, 'o');
  const auto tokens = static_cast<int64_t>(std::filesystem::file_size(path("text.txt")));
  const auto held = [&](const std::string& more) {
    const auto r = run("data text.txt --tokenizer bytes");
    std::filesystem::remove_all(path("run"));
    const auto trained = train("--tokenizer bytes --steps 1 --out run --format json " + more);
    EXPECT_EQ(trained.status, 0) << trained.err;
    return trained.err;
  };
  const auto words = [](int64_t n) { return fmt::format("{:.1f}K", static_cast<double>(n) / 1000); };
  EXPECT_NE(held("--val-share 0.25").find(words(tokens - tokens * 3 / 4) + " tokens held out"), std::string::npos);
  const std::string whole = held("--val-data other.txt");
  EXPECT_NE(whole.find(words(tokens) + " characters of training text"), std::string::npos) << whole;
  EXPECT_NE(whole.find("700 tokens held out"), std::string::npos) << whole;
  const auto more = run("train --resume --out run --config run/config.toml --steps 3");
  EXPECT_EQ(more.status, 0) << more.err;
  std::ofstream(path("rows.jsonl")) << R"({"prompt": "a", "completion": "b"})"
                                    << "\n";
  EXPECT_EQ(train("--tokenizer bytes --data rows.jsonl --val-data rows.jsonl --steps 1 --out rows").status, 0);
  expect_failure("train --val-data other.txt --val-share 0.2", 2, "--val-data: expected no --val-share");
  expect_failure("train --data text.txt --val-data rows.jsonl", 2, "--val-data: expected a text");
  expect_failure("train --data text.txt --val-data nowhere.txt", 4, "nowhere.txt");
  ASSERT_EQ(run("data text.txt --tokenizer bytes --out made").status, 0);
  expect_failure("train --data made --val-share 0.2", 2, "--val-share: expected a text or a file of examples");
}

}  // namespace
}  // namespace tessera
