// Plans that are run beside their predictions, and what `train` says on a machine that was measured.
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <set>
#include <sstream>

#include "planner/machine.h"
#include "tests/app/program.h"
#include "tests/support/planted_machine.h"

namespace tessera {
namespace {

using Json = nlohmann::json;

class MeasuringTest : public test::ProgramTest {
 protected:
  void plant() const {
    const planner::Identity here = planner::identity_of_this(TESSERA_VERSION);
    std::filesystem::create_directories(path("cache"));
    std::ofstream(file()) << to_text(test::planted_machine(here.processors, TESSERA_VERSION));
  }
  std::filesystem::path file() const {
    return path("cache") / machine_file(planner::identity_of_this(TESSERA_VERSION)).filename();
  }
  const std::string plan_ =
      "plan --model gpt-nano --layers 2 --channels 32 --context 16 --vocab 64 --hardware this --dtype fp32 --batch 8 "
      "--ranks 2 ";
};

TEST_F(MeasuringTest, EveryPartOfAPlanOfTwoRanksIsPrinted) {
  plant();
  const test::Ran r =
      run(plan_ + "--pp 2 --schedule zb-h1 --microbatches 2 --zero 0 --recompute none --measure 1 --format json");
  ASSERT_EQ(r.status, 0) << r.err;
  std::istringstream in(r.out);
  std::vector<Json> lines;
  for (std::string line; std::getline(in, line);) lines.push_back(Json::parse(line));
  ASSERT_GE(lines.size(), 3U);
  EXPECT_EQ(lines.back()["event"], "recommendation");
  const Json& measured = lines[lines.size() - 2];
  ASSERT_EQ(measured["event"], "measured");
  EXPECT_EQ(measured["number"], 1);
  EXPECT_EQ(measured["plan"]["pp"], 2);
  std::set<std::string> parts;
  for (const Json& part : measured["parts"]) {
    parts.insert(part["part"]);
    EXPECT_GE(part["measured"].get<double>(), 0) << part;
    EXPECT_GE(part["predicted"].get<double>(), 0) << part;
    const double p = part["predicted"], m = part["measured"];
    if (part["part"] == "step") {
      EXPECT_EQ(part["off"].get<bool>(), std::abs(p - m) > 0.15 * m) << part;
    }
  }
  for (const char* part :
       {"step", "F of stage 0", "I of stage 0", "W of stage 0", "F of stage 1", "I of stage 1", "W of stage 1",
        "compute", "tp exposed", "cp exposed", "dp exposed", "bubble", "optimizer", "memory, parameters",
        "memory, gradients", "memory, optimizer", "memory, activations", "memory, communication", "memory, peak"})
    EXPECT_TRUE(parts.contains(part)) << part;
  // Parts that are counted and not timed agree to the byte.
  for (const Json& part : measured["parts"]) {
    const std::string name = part["part"];
    const bool counted = name == "memory, parameters" || name == "memory, gradients" || name == "memory, optimizer";
    EXPECT_TRUE(!counted || part["predicted"] == part["measured"]) << part;
  }
}

TEST_F(MeasuringTest, PartsThatAreOffAreNamed) {
  plant();
  const test::Ran r = run(plan_ + "--dp 2 --microbatches 1 --zero 0 --recompute none --measure 1");
  ASSERT_EQ(r.status, 0) << r.err;
  EXPECT_NE(r.out.find("Measured: number 1, dp=2"), std::string::npos) << r.out;
  EXPECT_NE(r.out.find("Off by more than 15%: step; "), std::string::npos) << r.out;
}

TEST_F(MeasuringTest, OptionsThatCannotBe) {
  plant();
  expect_failure("plan --model gpt2 --hardware h100 --ranks 2 --measure 1", 2, "--measure: expected --hardware this");
  expect_failure("plan --model gpt2 --hardware h100 --ranks 2 --calibrate", 2, "--calibrate: expected --hardware this");
  for (const char* bad : {"0", "1,", "x", "1,,2", "1 2"})
    expect_failure(plan_ + "--measure '" + bad + "'", 2, "--measure: expected a whole number");
  expect_failure(plan_ + "--measure 999", 2, "--measure: expected numbers of the ranking, 1 to ");
  expect_failure(plan_ + "--software megatron", 2, "--software: expected tessera");
}

TEST_F(MeasuringTest, TrainSaysThePredictionOnlyWhereThereIsOne) {
  const auto words = [&](const std::string& out) {
    return train("--ranks 2 --steps 6 --no-eval --no-save --out " + out).out;
  };
  const auto summary = [&](const std::string& out) {
    const std::string all = train("--ranks 2 --steps 6 --no-eval --no-save --format json --out " + out).out;
    const std::string trimmed = all.substr(0, all.find_last_not_of('\n') + 1);
    return Json::parse(trimmed.substr(trimmed.rfind('\n') + 1));
  };
  EXPECT_EQ(words("a").find("predicted"), std::string::npos);
  EXPECT_FALSE(summary("b").contains("predicted"));
  plant();
  EXPECT_NE(words("c").find("A step was predicted to take "), std::string::npos);
  const Json with = summary("d");
  ASSERT_TRUE(with.contains("predicted"));
  EXPECT_GT(with["predicted"]["step_s"], 0.0);
  EXPECT_GT(with["predicted"]["measured_step_s"], 0.0);
  std::ofstream(file(), std::ios::app) << "damaged\n";
  EXPECT_FALSE(summary("e").contains("predicted"));
}

}  // namespace
}  // namespace tessera
