// Progress lines and metrics.jsonl.

#include "app/train/output.h"

#include <clocale>

#include "tests/app/curves.h"
#include "tests/app/program.h"

namespace tessera {

namespace {

// The output of a Progress with these options for 100 steps.
std::string shown(Progress::Options options) {
  char* text = nullptr;
  size_t size = 0;
  std::FILE* const file = open_memstream(&text, &size);
  options.to = file;
  options.steps = 100;
  {
    Progress progress(options);
    progress.message("hello");
    for (int64_t i = 1; i <= 100; ++i) progress.step({i, 2.5, 1e-3, 0.75, 12345, 100});
    progress.message("bye");
  }
  std::fclose(file);
  const std::string out(text, size);
  std::free(text);
  return out;
}

TEST(Progress, WritesPlainLinesAwayFromATerminal) {
  const std::string out = shown({});
  EXPECT_EQ(out.find('\033'), std::string::npos);
  EXPECT_EQ(out.find('\r'), std::string::npos);
  EXPECT_NE(out.find("step 50/100  loss 2.5000  lr 1.00e-03  grad norm 0.75  12.3K tok/s  5 s left\n"),
            std::string::npos)
      << out;
  const auto lines = std::count(out.begin(), out.end(), '\n');
  EXPECT_GE(lines, 20);
  EXPECT_LE(lines, 25);
}

TEST(Progress, RewritesOneLineOnATerminal) {
  const std::string out = shown({.terminal = true, .color = true});
  EXPECT_NE(out.find("\r\033[K"), std::string::npos);
  EXPECT_NE(out.find("\033[36m"), std::string::npos);
  EXPECT_NE(out.find("step 100/100"), std::string::npos);
  EXPECT_EQ(std::count(out.begin(), out.end(), '\n'), 2);                    // the two messages
  EXPECT_EQ(shown({.terminal = true}).find("\033[36m"), std::string::npos);  // NO_COLOR
}

// The most cells that one of the lines takes on a terminal; colours take no room, every other character takes one cell.
size_t widest(const std::string& out) {
  size_t cells = 0, most = 0;
  for (size_t i = 0; i < out.size(); ++i) {
    const auto byte = static_cast<unsigned char>(out[i]);
    if (byte == '\033')
      i = out.find_first_of("mK", i);
    else if (byte == '\r' || byte == '\n')
      cells = 0;
    else
      cells += (byte & 0xC0) != 0x80;
    most = std::max(most, cells);
  }
  return most;
}

TEST(Progress, NeverWrapsOnANarrowTerminal) {
  for (const int64_t columns : {1, 20, 60, 80, 90, 100, 200})
    EXPECT_LT(widest(shown({.terminal = true, .color = true, .columns = columns})), std::max<size_t>(columns, 7))
        << columns;  // "hello" is not a line of progress
  const std::string narrow = shown({.terminal = true, .columns = 80}), wide = shown({.terminal = true, .columns = 120});
  EXPECT_NE(narrow.find("left"), std::string::npos) << narrow;
  EXPECT_NE(wide.find("━"), std::string::npos);
}

TEST(Progress, IsSilentWhenQuiet) { EXPECT_EQ(shown({.quiet = true}), ""); }

TEST(Progress, NumbersKeepTheirPointInAnyLocale) {
  const std::string expected = shown({});
  const char* const before = std::setlocale(LC_ALL, nullptr);
  const std::string restore = before;
  if (!std::setlocale(LC_ALL, "de_DE.UTF-8") && !std::setlocale(LC_ALL, "fr_FR.UTF-8"))
    GTEST_SKIP() << "no locale with a decimal comma here";
  EXPECT_EQ(shown({}), expected);
  std::setlocale(LC_ALL, restore.c_str());
}

TEST(Progress, AClosedOutputIsNoError) {
  std::FILE* const full = std::fopen("/dev/full", "w");
  Progress progress({.to = full, .steps = 3});
  for (int64_t i = 1; i <= 3; ++i) progress.step({i, 1, 1, 1, 1, 1});
  std::fclose(full);
}

TEST(Words, ForNumbersAndTimes) {
  EXPECT_EQ(short_number(999), "999");
  EXPECT_EQ(short_number(12345), "12.3K");
  EXPECT_EQ(short_number(1.5e6), "1.50M");
  EXPECT_EQ(duration(4.4), "4 s");
  EXPECT_EQ(duration(185), "3 min 05 s");
  EXPECT_EQ(duration(3720), "1 h 02 min");
}

TEST(Words, ForWhatIsNoNumberHaveNoSign) {
  EXPECT_EQ(number_text(std::copysign(std::nan(""), -1.0)), "nan");
  EXPECT_EQ(number_text(-2.5), "-2.5");
}

TEST(Words, DrawACurve) {
  EXPECT_EQ(sparkline({7, 6, 5, 4, 3, 2, 1, 0}, 8), "█▇▆▅▄▃▂▁");
  EXPECT_EQ(sparkline({2, 0, 0, 0}, 2), "█▁");  // means of halves
  EXPECT_EQ(sparkline({3, 3}, 9), "▁▁");
  EXPECT_EQ(sparkline({}, 9), "");
}

class MetricsTest : public testing::Test {
 protected:
  std::filesystem::path run() const { return folder_.path(); }
  std::filesystem::path path() const { return run() / "metrics.jsonl"; }
  TemporaryDirectory folder_{std::filesystem::temp_directory_path() / "tessera-metrics-"};
};

TEST_F(MetricsTest, AResumedRunDropsWhatItWillMakeAgain) {
  {
    Metrics m(run(), 0);
    for (int i = 1; i <= 4; ++i) m.write(R"({"event":"step","step":)" + std::to_string(i) + "}");
    m.write(R"({"event":"summary","steps":4})");
  }
  std::ofstream(path(), std::ios::app) << R"({"event":"step","st)";  // cut by a kill
  {
    Metrics m(run(), 2);
    m.write(R"({"event":"step","step":3})");
  }
  EXPECT_EQ(read_file(path()),
            "{\"event\":\"step\",\"step\":1}\n{\"event\":\"step\",\"step\":2}\n{\"event\":\"step\",\"step\":3}\n");
}

TEST_F(MetricsTest, KnowTheValidationThatTheyHave) {
  for (const int64_t resumed : {0, 3, 2}) {
    Metrics m(run(), resumed);
    EXPECT_EQ(m.has_validation_of(2), resumed == 2) << resumed;
    EXPECT_EQ(m.has_validation_of(3), resumed == 3) << resumed;
    if (resumed != 0) continue;
    for (const int i : {2, 3}) m.write(R"({"event":"eval","step":)" + std::to_string(i) + "}");
  }
}

TEST_F(MetricsTest, RefusesAnotherKindOfFileAndAFullDisk) {
  std::ofstream(path()) << "something else\n";
  EXPECT_THROW(Metrics(run(), 3), InputError);
  EXPECT_THROW(Metrics("/nonexistent", 0), OutputError);
  std::filesystem::remove(path());
  std::filesystem::create_symlink("/dev/full", path());
  Metrics full(run(), 0);
  EXPECT_THROW(full.write("{}"), OutputError);
}

// TensorBoard's view of a run: exactly the numbers of metrics.jsonl, read with TensorBoard's own reader.

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
