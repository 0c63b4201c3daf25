// Holds docs/reading.md to what it says of itself: that its files are there, that they can be read in an afternoon, and
// that what is to be noticed in a file stands in it.
#include <gtest/gtest.h>

#include <algorithm>

#include "tests/house/sources.h"

namespace tessera::house {
namespace {

constexpr int64_t kMostLines = 2550;
constexpr size_t kStops = 14;

// The names between backticks.
std::vector<std::string> names_in(const std::string& text) {
  static const std::regex name("`([^`]+)`");
  std::vector<std::string> out;
  for (std::sregex_iterator it(text.begin(), text.end(), name), end; it != end; ++it) out.push_back((*it)[1]);
  return out;
}

// A row of the table: | 3 | files | what to notice |
struct Stop {
  std::vector<std::string> files, names;
};

std::vector<Stop> stops_of(const std::string& page) {
  static const std::regex row(R"(^\| \d+ \| ([^|]+) \| ([^|]+) \|$)", std::regex::multiline);
  std::vector<Stop> out;
  for (std::sregex_iterator it(page.begin(), page.end(), row), end; it != end; ++it)
    out.push_back({names_in((*it)[1]), names_in((*it)[2])});
  return out;
}

TEST(Reading, TakesAnAfternoon) {
  const std::filesystem::path root = TESSERA_SOURCE_DIR;
  const std::vector<Stop> stops = stops_of(read_text(root / "docs/reading.md"));
  EXPECT_EQ(stops.size(), kStops);
  int64_t lines = 0;
  for (const Stop& stop : stops) {
    std::string text;
    EXPECT_FALSE(stop.files.empty());
    for (const std::string& file : stop.files) {
      EXPECT_TRUE(std::filesystem::exists(root / file)) << file;
      text += read_text(root / file);
    }
    lines += std::count(text.begin(), text.end(), '\n');
    for (const std::string& name : stop.names) {
      const bool there = std::regex_search(text, std::regex("\\b" + name + "_?\\b"));
      EXPECT_TRUE(there) << stop.files[0] << " has no " << name;
    }
  }
  EXPECT_LE(lines, kMostLines);
}

}  // namespace
}  // namespace tessera::house
