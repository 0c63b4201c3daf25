// The text that `tessera verify` prints for people says the same as its JSON.

#include <map>
#include <nlohmann/json.hpp>
#include <regex>

#include "tests/app/program.h"

namespace tessera {
namespace {

using VerifyTextTest = test::ProgramTest;

TEST_F(VerifyTextTest, HasALineForEachOperationAndEachRank) {
  const std::string line =
      "verify --layers 2 --heads 2 --channels 16 --context 8 --vocab 32 --batch 4 --microbatches 2 --steps 1 --dp 1 "
      "--pp 2 --threads-per-rank 1";
  const test::Ran text = run(line), json = run(line + " --format json");
  ASSERT_EQ(text.status, 0) << text.err;
  ASSERT_EQ(json.status, 0) << json.err;
  const nlohmann::json said = nlohmann::json::parse(json.out);
  const auto has = [&](const std::string& pattern) { return std::regex_search(text.out, std::regex(pattern)); };
  for (const auto& [axis, operations] : said["bytes"].items())
    for (const auto& [operation, counts] : operations.items())
      EXPECT_TRUE(
          has(fmt::format("\n +{} +{} +{} +{} +{:.2f} +{} ok +\\d+\n", axis, operation, counts["calls"].dump(),
                          counts["sent"].dump(), counts["sent"].get<double>() / 1e6, counts["expected"].dump())))
          << axis << " " << operation << "\n"
          << text.out;
  const nlohmann::json& memory = said["memory"];
  for (size_t rank = 0; rank < 2; ++rank) {
    std::string pattern = fmt::format("\n +{}", rank);
    for (const char* category : {"parameters", "gradients", "optimizer"})
      pattern += fmt::format(" +{}", memory[category]["measured"][rank].dump());
    const nlohmann::json& peak = memory["peak"]["measured"][rank];
    pattern += fmt::format(" ok +{} +{:.2f} +\\d+ ok\n", peak.dump(), peak.get<double>() / 1e6);
    EXPECT_TRUE(has(pattern)) << pattern << "\n" << text.out;
  }
  EXPECT_TRUE(has("in flight, by pipeline rank: 2 1; expected 2 1 ok\n")) << text.out;
  EXPECT_TRUE(has("bubble on the simulated clock.*: 0\\.3333 of the time; by formula 0\\.3333\n")) << text.out;
}

TEST_F(VerifyTextTest, SaysNothingOfAPipelineWhereThereIsNone) {
  const std::string line =
      "verify --layers 1 --heads 2 --channels 16 --context 8 --vocab 32 --batch 4 --steps 1 --ranks 2 "
      "--threads-per-rank 1";
  const test::Ran text = run(line), json = run(line + " --format json");
  EXPECT_EQ(text.out.find("bubble"), std::string::npos) << text.out;
  EXPECT_TRUE(nlohmann::json::parse(json.out)["bubble"].is_null()) << json.out;
}

constexpr const char* kOfDefects =
    "verify --layers 1 --heads 2 --channels 16 --context 8 --vocab 32 --batch 4 --steps 1 --dp 2 --threads-per-rank 1 ";

TEST_F(VerifyTextTest, SaysWhatADefectBreaksAndWhy) {
  const std::string line = std::string(kOfDefects) + "--defect missing-gradient-sum";
  const test::Ran json = run(line + " --format json");
  EXPECT_EQ(json.status, 1) << json.err;
  const nlohmann::json said = nlohmann::json::parse(json.out);
  EXPECT_FALSE(said["passed"].get<bool>());
  EXPECT_EQ(said["defect"]["name"], "missing-gradient-sum");
  EXPECT_EQ(said["diagnosis"][0]["cause"], "missing-gradient-sum");
  std::map<std::string, int> bounds;
  for (const nlohmann::json& b : said["broken"]) ++bounds[b["bound"].get<std::string>()];
  for (const char* bound : {"gradient", "parameter", "state", "bytes", "gradient norm"}) EXPECT_GE(bounds[bound], 1);
  const test::Ran hidden = run(line + " --hide");
  EXPECT_EQ(hidden.status, 1);
  const auto at = [&](const char* words) { return hidden.out.find(words); };
  EXPECT_LT(at("bounds broke:"), at("What is wrong?")) << hidden.out;
  EXPECT_LT(at("What is wrong?"), at("Likely cause: gradients are not summed")) << hidden.out;
  EXPECT_LT(at("Likely cause"), at("Planted: missing-gradient-sum, on every rank")) << hidden.out;
}

TEST_F(VerifyTextTest, RefusesDefectsThatCannotBePlanted) {
  expect_failure(std::string(kOfDefects) + "--defect missing-output-sum", 2, "--defect: missing-output-sum cannot be");
  expect_failure(std::string(kOfDefects) + "--defect missing-output-sum", 2, "it can with --tp 2");
  expect_failure(std::string(kOfDefects) + "--defect nothing", 2, "expected random or one of missing-gradient-sum, ");
  expect_failure(std::string(kOfDefects) + "--hide", 2, "--hide");
  EXPECT_NE(run("verify --defect list").out.find("stale-part"), std::string::npos);
}

}  // namespace
}  // namespace tessera
