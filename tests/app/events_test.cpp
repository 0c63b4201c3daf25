// TensorBoard's view of a run: exactly the numbers of metrics.jsonl, read with TensorBoard's own reader.
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "tests/app/curves.h"
#include "tests/app/program.h"

namespace tessera {
namespace {
namespace fs = std::filesystem;
using test::Curves;

class EventsTest : public test::ProgramTest {
 protected:
  Curves recorded() const { return test::recorded_curves(path("run")); }
  Curves read(const std::string& view) const { return test::read_curves(path("run"), view); }
  std::vector<fs::path> event_files() const {
    std::vector<fs::path> out;
    for (const auto& e : fs::directory_iterator(path("run")))
      if (e.path().filename().string().starts_with("events.out.tfevents.")) out.push_back(e.path());
    return out;
  }
};

TEST_F(EventsTest, TensorBoardShowsTheNumbersOfMetricsAcrossAResume) {
  if (const std::string why = test::tensorboard_missing(); !why.empty()) GTEST_SKIP() << why;
  ASSERT_EQ(train("--out run --eval-every 4 --save-every 5").status, 0);
  const Curves first = recorded();
  EXPECT_EQ(read("shown"), first);
  EXPECT_EQ(first.at("loss").size(), 12U);
  EXPECT_EQ(first.at("val_loss").size(), 3U);

  // As a kill at the very end leaves it: the newest checkpoint is of step 10, the last record is torn.
  fs::remove_all(path("run/checkpoints/step-12"));
  ASSERT_EQ(event_files().size(), 1U);
  fs::resize_file(event_files()[0], fs::file_size(event_files()[0]) - 7);
  std::ofstream(path("run/metrics.jsonl"), std::ios::app) << R"({"event":"step","st)";
  ASSERT_EQ(run("train --resume --out run").status, 0);
  EXPECT_EQ(event_files().size(), 2U);
  const Curves resumed = recorded();
  for (const char* tag : {"loss", "lr", "grad_norm", "val_loss"}) EXPECT_EQ(resumed.at(tag), first.at(tag)) << tag;
  EXPECT_EQ(read("shown"), resumed);
  EXPECT_EQ(read("held").at("loss").size(), 14U);  // steps 11 and 12 twice: the session's start hides the first ones

  // Nothing is left to do: nothing is written a second time.
  ASSERT_EQ(run("train --resume --out run").status, 0);
  EXPECT_EQ(event_files().size(), 3U);
  EXPECT_EQ(recorded(), resumed);
  EXPECT_EQ(read("shown"), resumed);
}

}  // namespace
}  // namespace tessera
