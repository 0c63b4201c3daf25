// Output goes where its name leads: to a pipe, a device, standard output or the target of a link, which stay what they
// are; and never into a file that has got the number of a closed descriptor.
#include <fcntl.h>
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>

#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>

#include "data/files.h"
#include "tests/app/program.h"

namespace tessera {
namespace {
namespace fs = std::filesystem;
using test::Ran;

class OutputPlacesTest : public test::ProgramTest {
 protected:
  void SetUp() override { ASSERT_EQ(train("--out run --trace").status, 0); }
  // A device of our own: the machine's must not be at stake. False where none can be made.
  bool make_device(const char* name, unsigned int minor) const {
    const fs::path made = path(name);
    if (mknod(made.c_str(), S_IFCHR | 0666, makedev(1, minor)) != 0) return false;
    const int opened = ::open(made.c_str(), O_WRONLY | O_CLOEXEC);
    return opened >= 0 && ::close(opened) == 0;
  }
  bool is_device(const std::string& name) const { return fs::is_character_file(path(name)); }
  void expect_nothing_beside() const {
    for (const auto& e : fs::recursive_directory_iterator(folder_.path()))
      EXPECT_EQ(e.path().filename().string().find(".tmp-"), std::string::npos) << e.path();
  }
};

const std::string kRows = "bench --benchmark_filter=^op/gelu/forward/fp32 --benchmark_min_time=0.001 ";

TEST_F(OutputPlacesTest, ADeviceIsWrittenTo) {
  const std::string null = "null", full = "full";
  if (!make_device("null", 3) || !make_device("full", 7)) GTEST_SKIP() << "no device can be made here";
  for (const std::string& command : {std::string("report run --out "), kRows}) {
    const std::string to = command.starts_with("bench") ? command + "--benchmark_out=" : command;
    const Ran r = run(to + null);
    EXPECT_EQ(r.status, 0) << r.err;
    EXPECT_TRUE(is_device(null)) << to;
    expect_failure(to + full, 6, "cannot write full: No space left on device");
    EXPECT_TRUE(is_device(full)) << to;
  }
  const std::string record = "train " + kSmall + "--ranks 2 --dp-mode ps-async --no-save --no-eval --out ";
  EXPECT_EQ(run(record + "a --record " + null).status, 0);
  EXPECT_TRUE(is_device(null));
  expect_failure(record + "b --record " + full, 6, "full");
  expect_failure("train " + kSmall + "--out " + null, 2, "null");
  expect_failure("data text.txt --out " + null, 6, "null");
  EXPECT_TRUE(is_device(null) && is_device(full));
  expect_nothing_beside();
}

TEST_F(OutputPlacesTest, APipeIsWrittenTo) {
  ASSERT_EQ(mkfifo(path("pipe").c_str(), 0600), 0);
  const Ran r = run("report run --out pipe", "(timeout 30 cat pipe > page.html &) ;");
  EXPECT_EQ(r.status, 0) << r.err;
  EXPECT_TRUE(fs::is_fifo(path("pipe")));
  EXPECT_EQ(run("report run").status, 0);
  for (int i = 0; i < 200 && fs::file_size(path("page.html")) < fs::file_size(path("run/report.html")); ++i)
    usleep(10000);
  EXPECT_EQ(read_file(path("page.html")), read_file(path("run/report.html")));
  expect_failure("data text.txt --out pipe", 6, "pipe");
  expect_failure("train " + kSmall + "--out pipe", 2, "pipe");
}

TEST_F(OutputPlacesTest, StandardOutputIsWrittenTo) {
  EXPECT_EQ(run("report run").status, 0);
  const std::string page = read_file(path("run/report.html"));
  // Links of our own, as /dev/stdout is one.
  fs::create_symlink("/proc/self/fd/1", path("stdout"));
  fs::create_symlink("/proc/self/fd/2", path("stderr"));
  const Ran r = run("report run --out stdout");  // a file, which must stay the one that the shell has opened
  EXPECT_EQ(r.status, 0) << r.err;
  EXPECT_EQ(r.out, page);
  EXPECT_EQ(run("report run --out stdout | cat").out, page);
  EXPECT_EQ(run("report run --out stderr").err, page);
  EXPECT_TRUE(fs::is_symlink(path("stdout")) && fs::is_symlink(path("stderr")));
}

TEST_F(OutputPlacesTest, ALinkIsFollowed) {
  fs::create_directories(path("far"));
  fs::create_symlink("far/page.html", path("link.html"));
  for (const char* what : {"a new file", "an old one"}) {
    EXPECT_EQ(run("report run --out link.html").status, 0) << what;
    EXPECT_TRUE(fs::is_symlink(path("link.html"))) << what;
    EXPECT_NE(read_file(path("far/page.html")).find("<html"), std::string::npos) << what;
  }
  fs::create_symlink("round.html", path("round.html"));
  expect_failure("report run --out round.html", 6, "cannot write round.html");
  fs::create_symlink("nowhere", path("set"));
  expect_failure("data text.txt --out set", 6, "set");
  EXPECT_TRUE(fs::is_symlink(path("set")));
  expect_nothing_beside();
}

// A name that another program has planted where one could be guessed must not be written through.
TEST_F(OutputPlacesTest, TemporaryNamesAreNotReused) {
  const TemporaryName first(path("x")), second(path("x"));
  EXPECT_NE(first.path(), second.path());
  write_file(path("victim"), "as it was");
  const Ran r = run("report run --out page.html", "ln -s victim page.html.tmp-$$; exec");
  EXPECT_EQ(r.status, 0) << r.err;
  EXPECT_EQ(read_file(path("victim")), "as it was");
}

TEST_F(OutputPlacesTest, BenchWritesItsRowsOrFails) {
  const Ran r = run(kRows + "--benchmark_out=rows.json");
  ASSERT_EQ(r.status, 0) << r.err;
  EXPECT_NE(r.out.find("op/gelu/forward/fp32"), std::string::npos) << r.out;
  const auto rows = nlohmann::json::parse(read_file(path("rows.json")));
  EXPECT_EQ(rows.at("benchmarks").size(), 1U);
  EXPECT_TRUE(rows.at("context").contains("ceiling_fp32")) << rows;
  EXPECT_NO_THROW(nlohmann::json::parse(run(kRows + "--benchmark_format=json").out));
  expect_failure(kRows + "--benchmark_out=missing/rows.json", 6, "missing");
}

// The first files that are opened would be descriptors 0, 1 and 2, and get what is printed.
TEST_F(OutputPlacesTest, ClosedDescriptorsAreNotTakenByFiles) {
  ASSERT_EQ(train("--out whole").status, 0);
  for (const char* closed : {"0<&-", "1>&-", "2>&-", "1>&- 2>&-", "0<&- 1>&- 2>&-"}) {
    fs::remove_all(path("closed"));
    const int status =
        std::system(fmt::format("cd '{}' && TESSERA_CACHE=cache '{}' train {} --out closed > /dev/null 2> err.txt {}",
                                folder_.path().string(), TESSERA_BINARY, kSmall, closed)
                        .c_str());
    EXPECT_EQ(WEXITSTATUS(status), 0) << closed;
    for (const char* file :
         {"config.toml", "checkpoints/step-12/model.safetensors", "checkpoints/step-12/config.toml"}) {
      std::string expected = read_file(path("whole") / file);
      if (const size_t at = expected.find("whole"); at != std::string::npos) expected.replace(at, 5, "closed");
      EXPECT_EQ(read_file(path("closed") / file), expected) << closed << ": " << file;
    }
    std::ifstream records(path("closed/metrics.jsonl"));
    for (std::string line; std::getline(records, line);) EXPECT_TRUE(nlohmann::json::accept(line)) << closed << line;
    const std::string events = [&] {
      for (const auto& e : fs::directory_iterator(path("closed")))
        if (e.path().filename().string().starts_with("events.out")) return read_file(e.path());
      return std::string();
    }();
    EXPECT_FALSE(events.empty());
    for (const char* printed : {"characters of training text", "A sample:", "validation loss"})
      EXPECT_EQ(events.find(printed), std::string::npos) << closed << ": " << printed;
  }
}

TEST_F(OutputPlacesTest, FilesOfARunAreForAllToRead) {
  ASSERT_EQ(run("train " + kSmall + "--out mine --trace", "umask 022;").status, 0);
  for (const auto& e : fs::recursive_directory_iterator(path("mine"))) {
    const auto expected = e.is_directory() ? 0755 : 0644;
    EXPECT_EQ(static_cast<int>(e.status().permissions()), expected) << e.path();
  }
}

}  // namespace
}  // namespace tessera
