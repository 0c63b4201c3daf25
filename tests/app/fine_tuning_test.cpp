// The page on fine-tuning: its commands run in order, in a folder that has what the page names, and print what it shows
// but for numbers.
#include <regex>

#include "tests/app/docs_pages.h"
#include "tests/app/program.h"
#include "tests/support/draw.h"

namespace tessera {
namespace {
namespace fs = std::filesystem;
using test::Lines;

// Numbers may differ from machine to machine, what the model makes of a word too, and with them how wide columns are.
std::string without_numbers(const std::string& line) {
  const std::regex number("[0-9][0-9.e+-]*|two|three|four|five|six|seven|eight");
  return std::regex_replace(std::regex_replace(line, number, "#"), std::regex(" +"), " ");
}

TEST(FineTuningPage, SaysWhatIsPrinted) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "many times slower with sanitizers";
#endif
  if (!test::is_drawn(0, 3)) GTEST_SKIP() << "a minute; TESSERA_DRAW draws every third time";
  const fs::path source = TESSERA_SOURCE_DIR;
  const TemporaryDirectory folder(fs::temp_directory_path() / "tessera-page-");
  fs::create_directory_symlink(source / "examples", folder.path() / "examples");
  fs::create_symlink(source / "README.md", folder.path() / "README.md");
  fs::create_symlink(TESSERA_BINARY, folder.path() / "tessera");
  const Lines page = test::lines_of(read_file(source / "docs/fine_tuning.md"));
  size_t commands = 0;
  for (size_t i = 0; i + 2 < page.size(); ++i) {
    if (page[i] != "```console") continue;
    ASSERT_TRUE(page[i + 1].starts_with("$ ./tessera ")) << page[i + 1];
    const std::string command = page[i + 1].substr(2);
    const int status = std::system(
        fmt::format("cd '{}' && TESSERA_CACHE=cache {} > out.txt 2> err.txt", folder.path().string(), command).c_str());
    ASSERT_EQ(status, 0) << command << "\n" << read_file(folder.path() / "err.txt");
    ++commands;
    if (page[i + 3] != "```") continue;
    Lines shown;
    size_t at = i + 4;
    for (; page[at] != "```"; ++at) shown.push_back(without_numbers(page[at]));
    Lines found;
    for (const std::string& line : test::lines_of(read_file(folder.path() / "out.txt")))
      found.push_back(without_numbers(line));
    EXPECT_EQ(shown, test::left_out(shown, found)) << command;
    i = at;
  }
  EXPECT_GE(commands, 9u);
}

}  // namespace
}  // namespace tessera
