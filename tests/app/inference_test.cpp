// generate and evaluate: the same texts and the same loss under every plan, and alone as in a batch.
#include <cmath>
#include <nlohmann/json.hpp>
#include <set>

#include "tests/app/program.h"

namespace tessera {
namespace {
namespace fs = std::filesystem;
using Json = nlohmann::json;

constexpr const char* kPlans[] = {"--ranks 1", "--dp 2", "--dp 2 --zero 3",
                                  "--tp 2",    "--pp 2", "--tp 2 --pp 2 --dp 2 --zero 3"};

std::vector<Json> lines_of(const std::string& text) {
  std::vector<Json> out;
  for (size_t at = 0; at < text.size();) {
    const size_t end = text.find('\n', at);
    out.push_back(Json::parse(text.substr(at, end - at)));
    at = end + 1;
  }
  return out;
}

class InferenceTest : public test::ProgramTest {
 protected:
  void make(const std::string& model) const {
    fs::remove_all(path("base"));
    const auto ran = run("train --data text.txt --model " + model +
                         " --layers 2 --heads 2 --channels 16 --context 16 --tokenizer bytes --batch 4 --steps 30 "
                         "--warmup 2 --lr 0.02 --threads-per-rank 1 --ranks 1 --out base");
    ASSERT_EQ(ran.status, 0) << ran.err;
  }
  void write(const std::string& name, const std::string& text) const { std::ofstream(path(name)) << text; }
  std::string generate(const std::string& more) const {
    const auto ran = run("generate base --threads-per-rank 1 " + more);
    EXPECT_EQ(ran.status, 0) << more << ran.err;
    return ran.out;
  }
  Json evaluate(const std::string& more) const {
    const auto ran = run("evaluate base --threads-per-rank 1 --format json " + more);
    EXPECT_EQ(ran.status, 0) << more << ran.err;
    return ran.status == 0 ? lines_of(ran.out).at(0) : Json();
  }
};

TEST_F(InferenceTest, WritesTheSameUnderEveryPlan) {
  const std::string several =
      "--prompt 'Line 7' --prompt 'a text that is longer than all of the context' --prompt of --tokens 40 "
      "--temperature 0.7 --top-k 9 --repetition-penalty 1.1 --seed 5 --format json ";
  for (const char* model : {"llama-nano --kv-heads 2", "gpt-nano", "llama-nano --kv-heads 2 --experts 4"}) {
    make(model);
    const std::string one = generate("--prompt 'Line 7' --temperature 0 --tokens 40"), all = generate(several);
    EXPECT_EQ(lines_of(all).size(), 3u);
    for (const char* plan : kPlans) {
      EXPECT_EQ(generate(std::string("--prompt 'Line 7' --temperature 0 --tokens 40 ") + plan), one) << model << plan;
      EXPECT_EQ(generate(several + plan), all) << model << plan;
    }
  }
}

// Draws differ by the prompt's number, and greedy texts not at all.
TEST_F(InferenceTest, APromptAmongOthersIsWrittenAsAlone) {
  make("llama-nano");
  write("prompts.txt", "Line 1\na text\n\nsays little, but more of it\nL\r\n");
  const std::vector<Json> together =
      lines_of(generate("--prompts prompts.txt --temperature 0 --tokens 25 --format json"));
  ASSERT_EQ(together.size(), 4u);
  EXPECT_EQ(together[3].at("prompt"), "L");
  for (const Json& one : together) {
    const std::string prompt = one.at("prompt").get<std::string>();
    const std::string alone = generate("--prompt '" + prompt + "' --temperature 0 --tokens 25");
    EXPECT_EQ(alone, prompt + one.at("text").get<std::string>() + "\n");
    EXPECT_EQ(one.at("tokens"), 25);
    EXPECT_EQ(one.at("ended"), "length");
  }
}

// A stop text may reach over several tokens, here of one byte each; what begins it is held back until it is sure.
TEST_F(InferenceTest, StopsBeforeItsStopTexts) {
  make("llama-nano");
  const std::string whole = generate("--prompt Line --temperature 0 --tokens 60"), text = whole.substr(4);
  for (const size_t at : {5u, 17u, 30u})
    for (const size_t length : {1u, 3u, 6u}) {
      const std::string stop = text.substr(at, length), found = text.substr(0, text.find(stop));
      if (stop.find('\n') != std::string::npos || stop.find('\'') != std::string::npos) continue;
      const std::string more = "--prompt Line --temperature 0 --tokens 60 --stop zzz --stop '" + stop + "' ";
      EXPECT_EQ(generate(more), "Line" + found + "\n") << stop;
      const Json json = lines_of(generate(more + "--format json")).at(0);
      EXPECT_EQ(json.at("text"), found);
      EXPECT_EQ(json.at("ended"), "stop");
    }
}

TEST_F(InferenceTest, EvaluatesTheSameUnderEveryPlan) {
  write("other.txt", "Line 3 of a text that says nothing at all.\nAnd another line.\n");
  write("pairs.jsonl",
        "{\"prompt\": \"Line 1\", \"completion\": \" of a text\"}\n{\"prompt\": \"Li\", \"completion\": \"ne 2\"}\n");
  for (const char* model : {"llama-nano --kv-heads 2", "gpt-nano"}) {
    make(model);
    for (const std::string data : {"other.txt", "pairs.jsonl --template none"}) {
      const Json one = evaluate("--data " + data);
      EXPECT_EQ(one.at("tokens"), data == "other.txt" ? 60 : 14);
      for (const std::string plan : kPlans) {
        const Json found = evaluate("--data " + data + " " + plan);
        const double a = found.at("loss").get<double>(), b = one.at("loss").get<double>();
        if (plan.find("tp") == std::string::npos)
          EXPECT_EQ(a, b) << model << data << plan;
        else
          EXPECT_NEAR(a, b, 1e-6) << model << data << plan;
      }
      EXPECT_NEAR(evaluate("--data " + data + " --batch 1").at("loss").get<double>(), one.at("loss").get<double>(),
                  1e-6);
    }
    const Json one = evaluate("--data other.txt");
    EXPECT_NEAR(one.at("bits_per_byte").get<double>(), one.at("loss").get<double>() * 60 / 61 / std::log(2.0), 1e-9);
    for (const char* plan : {"--cp 2", "--cp 2 --cp-mode ulysses", "--tp 2 --sp"})
      EXPECT_NEAR(evaluate(std::string("--data other.txt ") + plan).at("loss").get<double>(),
                  one.at("loss").get<double>(), 1e-6);
  }
}

// Training and evaluate say the same of the tokens of the validation part.
TEST_F(InferenceTest, EvaluatesAsTrainingValidates) {
  ASSERT_EQ(run("data text.txt --tokenizer bytes --out tokens").status, 0);
  const auto ran =
      run("train --data tokens --layers 1 --heads 2 --channels 16 --context 16 --batch 4 --steps 5 "
          "--threads-per-rank 1 --ranks 1 --format json --out base");
  ASSERT_EQ(ran.status, 0) << ran.err;
  const Json summary = lines_of(ran.out).back();
  const Json found = evaluate("--data tokens");
  EXPECT_NEAR(found.at("loss").get<double>(), summary.at("val_loss").get<double>(), 1e-6);
  ASSERT_EQ(run("checkpoint export base --out folder").status, 0);
  const auto folder = run("evaluate folder --threads-per-rank 1 --data tokens --format json");
  EXPECT_EQ(lines_of(folder.out).at(0), found);
}

TEST_F(InferenceTest, MistakesAreNamed) {
  make("llama-nano");
  write("empty.txt", "");
  write("one.txt", "a");
  expect_failure("evaluate base", 2, "--data: expected a text, tokens or examples; found none");
  expect_failure("evaluate base --data nowhere.txt", 4, "nowhere.txt");
  expect_failure("evaluate base --data one.txt", 4, "1 tokens; expected at least 2");
  expect_failure("evaluate base --data empty.txt", 4, "empty.txt");
  expect_failure("evaluate base --data text.txt --tp 3", 2, "--tp: 3 does not divide");
  expect_failure("evaluate base --data text.txt --lr 3", 2, "unknown option '--lr'");
  expect_failure("evaluate base --data text.txt --context 32", 2, "--context: the model has 16");
  expect_failure("generate base --prompt ''", 2, "--prompt: expected at least one character");
  expect_failure("generate base --stop ''", 2, "--stop: expected at least one character");
  expect_failure("generate base --prompts empty.txt", 4, "no prompts; expected one on each line");
  expect_failure("generate base --cp 2", 2, "unknown option '--cp'");
  expect_failure("generate base --min-p 2", 2, "--min-p: expected a number in [0, 1]");
  expect_failure("generate nowhere", 4, "nowhere");
}

}  // namespace
}  // namespace tessera
