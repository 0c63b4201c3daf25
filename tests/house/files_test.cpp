// Holds what every file of the house has in common: its length, the comment it opens with, and that the list of
// packages and the README's table of them say the same, and the build's version and the changelog.
#include <gtest/gtest.h>

#include <algorithm>

#include "tests/house/sources.h"

namespace tessera::house {
namespace {

constexpr int64_t kMostLines = 600;

std::string too_long(const Source& source) {
  const int64_t lines = std::count(source.text.begin(), source.text.end(), '\n');
  if (!source.is_code() || lines <= kMostLines) return "";
  return std::to_string(lines) + " lines; expected at most " + std::to_string(kMostLines);
}

std::string no_opening_comment(const Source& source) {
  if (source.ends_with(".txt") && !source.ends_with("CMakeLists.txt") && source.path != "packages.txt") return "";
  const bool good = source.is_code()          ? source.text.starts_with("//")
                    : source.ends_with(".py") ? source.text.starts_with("#") || source.text.starts_with("\"\"\"")
                                              : source.text.starts_with("#");
  if (good) return "";
  return "opens with \"" + source.text.substr(0, std::min<size_t>(20, source.text.find('\n'))) +
         "\"; expected a comment that says what the file is for";
}

std::set<std::string> packages_of(const std::string& list) {
  std::set<std::string> names;
  std::istringstream lines(list);
  for (std::string line, name; std::getline(lines, line);)
    if (std::istringstream(line) >> name && name[0] != '#') names.insert(name);
  return names;
}

// The first cells of the table rows, between backticks: | `name` | ...
std::set<std::string> packages_named(const std::string& readme) {
  static const std::regex row(R"(^\| `([a-z0-9+.-]+)` \|)", std::regex::multiline);
  std::set<std::string> names;
  for (std::sregex_iterator it(readme.begin(), readme.end(), row), end; it != end; ++it) names.insert((*it)[1]);
  return names;
}

// A linker refuses it in a shared library, so no pack could be linked.
std::string preinit_in_library(const Source& source) {
  const bool found = source.is_code() && source.text.find(std::string(".preinit") + "_array") != std::string::npos;
  return found && !source.path.starts_with("app/main/") ? "has a section that no shared library may have" : "";
}

TEST(Files, OfLayersLinkAsSharedLibraries) { EXPECT_EQ(complaints(preinit_in_library), ""); }
TEST(Files, AreShort) { EXPECT_EQ(complaints(too_long), ""); }
TEST(Files, OpenWithAComment) { EXPECT_EQ(complaints(no_opening_comment), ""); }

// What is fetched is named so that it is the same tomorrow: an image by its digest, a package of pip's by its version.
std::string fetches_what_may_change(const std::string& text) {
  static const std::regex image("(?:^FROM|^ *container:) +(\\S+)", std::regex::multiline),
      digest(".*@sha256:[0-9a-f]{64}"), install("pip install((?:(?: |\\\\\n *)+[-\\w.=]+)+)"), word("[-\\w.=]+");
  for (std::sregex_iterator it(text.begin(), text.end(), image), end; it != end; ++it)
    if (const std::string name = (*it)[1]; !std::regex_match(name, digest)) return name;
  for (std::sregex_iterator it(text.begin(), text.end(), install), end; it != end; ++it) {
    const std::string words = (*it)[1];
    for (std::sregex_iterator w(words.begin(), words.end(), word); w != end; ++w)
      if (const std::string name = w->str(); name[0] != '-' && name.find("==") == std::string::npos) return name;
  }
  return "";
}

TEST(Files, FetchedThingsHaveDigestsAndVersions) {
  for (const char* file : {"Containerfile", ".github/workflows/ci.yml", ".ci/run", "README.md", "docs/cuda.md"})
    EXPECT_EQ(fetches_what_may_change(read_text(std::filesystem::path(TESSERA_SOURCE_DIR) / file)), "") << file;
  EXPECT_EQ(fetches_what_may_change("a\n    container: debian:12\n"), "debian:12");
  EXPECT_EQ(fetches_what_may_change("pip install -q a==1 \\\n  --no-deps b\n"), "b");
}

TEST(Files, ReadmeNamesEveryPackage) {
  const std::filesystem::path root = TESSERA_SOURCE_DIR;
  const std::set<std::string> needed = packages_of(read_text(root / "packages.txt"));
  EXPECT_GT(needed.size(), 5u);
  EXPECT_EQ(packages_named(read_text(root / "README.md")), needed);
}

TEST(Files, ChangelogHasTheVersion) {
  const std::filesystem::path root = TESSERA_SOURCE_DIR;
  static const std::regex version(R"(project\(tessera VERSION ([0-9.]+))");
  const std::string build = read_text(root / "CMakeLists.txt");
  std::smatch match;
  ASSERT_TRUE(std::regex_search(build, match, version));
  EXPECT_NE(read_text(root / "CHANGELOG.md").find("\n## " + match.str(1) + "\n"), std::string::npos) << match.str(1);
}

TEST(Files, ViolationsAreSeen) {
  EXPECT_NE(too_long({"nn/a.cpp", std::string(601, '\n')}), "");
  EXPECT_EQ(too_long({"nn/a.cpp", std::string(600, '\n')}), "");
  EXPECT_NE(preinit_in_library({"app/a.cpp", std::string("section(\".preinit") + "_array\")"}), "");
  EXPECT_NE(no_opening_comment({"nn/a.h", "#pragma once\n"}), "");
  EXPECT_NE(no_opening_comment({"CMakeLists.txt", "project(x)\n"}), "");
  EXPECT_EQ(no_opening_comment({"nn/a.h", "// What this is for.\n"}), "");
  EXPECT_EQ(packages_of("# x\ng++  y\n\nz 1\n"), (std::set<std::string>{"g++", "z"}));
  EXPECT_EQ(packages_named("| `g++` | y |\nsay `z`\n"), (std::set<std::string>{"g++"}));
}

TEST(Files, AreFound) {
  const std::vector<Source> sources = all_sources();
  const auto has = [&](const std::string& path) {
    return std::any_of(sources.begin(), sources.end(), [&](const Source& s) { return s.path == path; });
  };
  EXPECT_TRUE(has("tensor/tensor.h") && has("CMakeLists.txt") && has("tests/house/files_test.cpp"));
  EXPECT_FALSE(includes_of({"x.h", "#include \"tensor/tensor.h\"\n"}).empty());
}

}  // namespace
}  // namespace tessera::house
