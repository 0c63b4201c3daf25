// Workers of an asynchronous run that learn nothing have together the losses of one rank that learns nothing.
#include <nlohmann/json.hpp>
#include <sstream>
#include <string>
#include <vector>

#include "tests/app/program.h"

namespace tessera {
namespace {

using AsyncRowsTest = test::ProgramTest;

TEST_F(AsyncRowsTest, AreThoseOfOneRank) {
  const auto losses = [&](const std::string& plan) {
    const test::Ran ran = train("--dropout 0.3 --lr 1e-30 --no-eval --no-save --format json " + plan);
    EXPECT_EQ(ran.status, 0) << ran.err;
    std::vector<double> out;
    std::istringstream lines(ran.out);
    for (std::string line; std::getline(lines, line);)
      if (const auto record = nlohmann::json::parse(line); record["event"] == "step") out.push_back(record["loss"]);
    return out;
  };
  const std::vector<double> alone = losses("--ranks 1");
  ASSERT_EQ(alone.size(), 12U);
  for (const std::string ranks : {"2", "4"}) {
    const std::vector<double> found = losses("--dp-mode ps-async --staleness 0 --servers 2 --ranks " + ranks);
    ASSERT_EQ(found.size(), alone.size());
    for (size_t i = 0; i < alone.size(); ++i) EXPECT_NEAR(found[i], alone[i], 2e-6 * alone[i]) << i;
  }
}

}  // namespace
}  // namespace tessera
