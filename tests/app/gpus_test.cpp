// The program with a GPU for each rank, real or emulated: it trains like one rank, in captured steps, and says why not
// where it cannot capture them.
#include "tests/support/gpus.h"

#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <sstream>
#include <string>
#include <vector>

#include "tests/app/program.h"

namespace tessera {
namespace {

class GpusTest : public test::ProgramTest {
 protected:
  void SetUp() override {
    if (const std::string why = test::no_gpus(2); !why.empty()) GTEST_SKIP() << why;
  }
  void TearDown() override { test::forget_emulated_gpus(); }
  std::vector<double> losses(const std::string& run) const {
    std::istringstream lines(read_file(path(run + "/metrics.jsonl")));
    std::vector<double> out;
    for (std::string line; std::getline(lines, line);)
      if (const auto record = nlohmann::json::parse(line); record.at("event") == "step")
        out.push_back(record.at("loss"));
    return out;
  }
};

TEST_F(GpusTest, RanksOverNcclTrainLikeOne) {
  const std::string on_gpus = "--device cuda --eval-every 0 ";
  const test::Ran two = train(on_gpus + "--ranks 2 --backend nccl --all-reduce native --cuda-graph on --out two"),
                  one = train(on_gpus + "--ranks 1 --out one");
  ASSERT_EQ(two.status, 0) << two.err;
  ASSERT_EQ(one.status, 0) << one.err;
  EXPECT_NE((two.out + two.err).find("CUDA graph: on"), std::string::npos) << two.out << two.err;
  const std::vector<double> of_two = losses("two"), of_one = losses("one");
  ASSERT_EQ(of_two.size(), of_one.size());
  for (size_t step = 0; step < of_one.size(); ++step) EXPECT_NEAR(of_two[step], of_one[step], 1e-4) << step;
  EXPECT_LT(of_two.back(), of_two.front());
}

TEST_F(GpusTest, WhatCannotBeCapturedSaysWhy) {
  expect_failure("train " + kSmall + "--device cuda --cp 2 --backend nccl --all-reduce native --cuda-graph on", 2,
                 "a step cannot be captured because the ranks of --cp-mode ring send each other messages");
}

}  // namespace
}  // namespace tessera
