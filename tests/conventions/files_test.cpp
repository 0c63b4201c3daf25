// Conventions of files and text: length, opening comment, pinned downloads, the README's package table, the version in
// the changelog, parameter names, options in library messages, and docs/reading.md.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <filesystem>
#include <iostream>
#include <regex>
#include <set>
#include <sstream>
#include <string>
#include <vector>

#include "tests/conventions/sources.h"

namespace tessera::conventions {
namespace {

constexpr int64_t kMaxLines = 600;

std::string too_long(const Source& source) {
  const int64_t lines = std::count(source.text.begin(), source.text.end(), '\n');
  if (!source.is_code() || lines <= kMaxLines) return "";
  return std::to_string(lines) + " lines; expected at most " + std::to_string(kMaxLines);
}

std::string no_opening_comment(const Source& source) {
  if (source.ends_with(".txt") && !source.ends_with("CMakeLists.txt") && source.path != "packages.txt") return "";
  const bool good = source.is_code()          ? source.text.starts_with("//")
                    : source.ends_with(".py") ? source.text.starts_with("#") || source.text.starts_with("\"\"\"")
                                              : source.text.starts_with("#");
  if (good) return "";
  return "opens with \"" + source.text.substr(0, std::min<size_t>(20, source.text.find('\n'))) +
         "\"; expected a comment that states the purpose of the file";
}

std::set<std::string> package_names(const std::string& list) {
  std::set<std::string> names;
  std::istringstream lines(list);
  for (std::string line, name; std::getline(lines, line);)
    if (std::istringstream(line) >> name && name[0] != '#') names.insert(name);
  return names;
}

// The first cells of the table rows, between backticks: | `name` | ...
std::set<std::string> packages_named(const std::string& readme) {
  static const std::regex row(R"(^\| `([a-z0-9+.-]+)` \|)", std::regex::multiline);
  const std::vector<std::string> names = first_groups(readme, row);
  return {names.begin(), names.end()};
}

// Linkers reject this section in shared libraries, which a packed build uses.
std::string preinit_section(const Source& source) {
  const bool found = source.is_code() && source.text.find(std::string(".preinit") + "_array") != std::string::npos;
  return found && !source.path.starts_with("app/main/") ? "has a section that no shared library may have" : "";
}

TEST(Files, HaveNoPreinitSections) { EXPECT_EQ(complaints(preinit_section), ""); }
TEST(Files, HaveAtMost600Lines) { EXPECT_EQ(complaints(too_long), ""); }
TEST(Files, BeginWithComment) { EXPECT_EQ(complaints(no_opening_comment), ""); }

// Downloads are reproducible: container images are pinned by digest, pip packages by version.
std::string unpinned_download(const std::string& text) {
  static const std::regex image("(?:^FROM|^ *container:) +(\\S+)", std::regex::multiline),
      digest(".*@sha256:[0-9a-f]{64}"), install("pip install((?:(?: |\\\\\n *)+[-\\w.=]+)+)"), word("([-\\w.=]+)");
  for (const std::string& name : first_groups(text, image))
    if (!std::regex_match(name, digest) && text.find(" AS " + name + "\n") == std::string::npos) return name;
  for (const std::string& words : first_groups(text, install))
    for (const std::string& name : first_groups(words, word))
      if (name[0] != '-' && name.find("==") == std::string::npos) return name;
  return "";
}

TEST(Files, DownloadsArePinned) {
  for (const char* file : {"Containerfile", ".github/workflows/ci.yml", ".ci/run", "README.md", "docs/cuda.md"})
    EXPECT_EQ(unpinned_download(read_text(std::filesystem::path(TESSERA_SOURCE_DIR) / file)), "") << file;
  EXPECT_EQ(unpinned_download("a\n    container: debian:12\n"), "debian:12");
  EXPECT_EQ(unpinned_download("FROM a AS b\nFROM b\n"), "a");
  EXPECT_EQ(unpinned_download("pip install -q a==1 \\\n  --no-deps b\n"), "b");
}

TEST(Files, ReadmeListsEveryPackage) {
  const std::filesystem::path root = TESSERA_SOURCE_DIR;
  const std::set<std::string> needed = package_names(read_text(root / "packages.txt"));
  EXPECT_GT(needed.size(), 5u);
  EXPECT_EQ(packages_named(read_text(root / "README.md")), needed);
}

TEST(Files, ChangelogContainsTheVersion) {
  const std::filesystem::path root = TESSERA_SOURCE_DIR;
  static const std::regex version(R"(project\(tessera VERSION ([0-9.]+))");
  const std::string build = read_text(root / "CMakeLists.txt");
  std::smatch match;
  ASSERT_TRUE(std::regex_search(build, match, version));
  EXPECT_NE(read_text(root / "CHANGELOG.md").find("\n## " + match.str(1) + "\n"), std::string::npos) << match.str(1);
}

TEST(Files, ChecksDetectViolations) {
  EXPECT_NE(too_long({"nn/a.cpp", std::string(601, '\n')}), "");
  EXPECT_EQ(too_long({"nn/a.cpp", std::string(600, '\n')}), "");
  EXPECT_NE(preinit_section({"app/a.cpp", std::string("section(\".preinit") + "_array\")"}), "");
  EXPECT_NE(no_opening_comment({"nn/a.h", "#pragma once\n"}), "");
  EXPECT_NE(no_opening_comment({"CMakeLists.txt", "project(x)\n"}), "");
  EXPECT_EQ(no_opening_comment({"nn/a.h", "// What this is for.\n"}), "");
  EXPECT_EQ(package_names("# x\ng++  y\n\nz 1\n"), (std::set<std::string>{"g++", "z"}));
  EXPECT_EQ(packages_named("| `g++` | y |\nsay `z`\n"), (std::set<std::string>{"g++"}));
}

TEST(Files, ScanFindsSourcesAndIncludes) {
  const std::vector<Source> sources = all_sources();
  const auto has = [&](const char* path) { return std::ranges::count(sources, path, &Source::path) == 1; };
  EXPECT_TRUE(has("tensor/tensor.h") && has("CMakeLists.txt") && has("tests/conventions/files_test.cpp"));
  EXPECT_FALSE(read_includes({"x.h", "#include \"tensor/tensor.h\"\n"}).empty());
}

// The properties of a parameter are fields of `Parameter`: code outside tests never compares a name with a string to
// identify a parameter or a unit.

// Names that models and layers assign to parameters and modules.
std::set<std::string> given_names(const std::vector<Source>& sources) {
  static const std::regex given(R"re((?:param|child<\w+>)\("(\w+)\.?")re");
  std::set<std::string> names;
  for (const Source& source : sources) {
    if (source.directory() != "nn" && source.directory() != "models") continue;
    for (const std::string& name : first_groups(source.text, given)) names.insert(name);
  }
  return names;
}

// A comparison with a literal that contains one of the names as a dotted component.
std::string compares_name(const Source& source, const std::set<std::string>& names) {
  static const std::regex literal(
      R"re((?:[=!]=\s*|\b(?:r?find|starts_with|ends_with|compare)\()"([\w.]+)"|"([\w.]+)"\s*[=!]=)re");
  static const std::regex word(R"((\w+))");
  // In recordings, tensors have the names of other programs, and there is no Parameter.
  const bool reads_recordings =
      source.path.starts_with("verify/audit/") || source.path.starts_with("verify/diagnosis/recorded");
  if (source.directory() == "tests" || reads_recordings || !source.is_code()) return "";
  for (const std::smatch& at : matches(source.text, literal)) {
    const std::string text = at[1].matched ? at[1] : at[2];
    for (const std::string& part : first_groups(text, word))
      if (names.contains(part)) return "compares with \"" + text + "\"; ask the Parameter";
  }
  return "";
}

TEST(ModuleNames, AreNotComparedWithStrings) {
  const std::set<std::string> names = given_names(all_sources());
  EXPECT_TRUE(names.contains("tokens") && names.contains("head") && names.contains("weight") && names.contains("qkv"));
  EXPECT_EQ(complaints([&](const Source& source) { return compares_name(source, names); }), "");
}

TEST(ModuleNames, CheckDetectsStringComparisons) {
  const std::set<std::string> names =
      given_names({{"models/a.cpp", "x(child<Embedding>(\"head\", 3)), y(param(\"weight\", {1}))"}});
  EXPECT_EQ(names, (std::set<std::string>{"head", "weight"}));
  EXPECT_NE(compares_name({"app/a.cpp", "if (unit.name == \"head\") f();"}, names), "");
  EXPECT_NE(compares_name({"app/a.cpp", "if (\"head\" != unit.name) f();"}, names), "");
  EXPECT_NE(compares_name({"app/a.cpp", "p.name.ends_with(\"head.weight\")"}, names), "");
  EXPECT_EQ(compares_name({"app/a.cpp", "if (mode == \"ring\") f(\"head\");"}, names), "");
  EXPECT_EQ(compares_name({"tests/a.cpp", "EXPECT_TRUE(name == \"head\");"}, names), "");
}

// Libraries name fields (`microbatches`); only the command line names options (--microbatches). No string literal of a
// layer below app/ may contain an option.

// The string literals of a file, unescaped; comments and character literals are skipped.
std::vector<std::string> find_literals(const std::string& text) {
  std::vector<std::string> out;
  for (size_t at = 0; at < text.size(); ++at) {
    const auto skip_to = [&](const std::string& end) { at = std::min(text.find(end, at), text.size()); };
    if (text.compare(at, 2, "//") == 0) {
      skip_to("\n");
    } else if (text.compare(at, 2, "/*") == 0) {
      skip_to("*/");
    } else if (text.compare(at, 2, "R\"") == 0) {
      const size_t open = text.find('(', at), begin = open + 1;
      const std::string end = ")" + text.substr(at + 2, open - at - 2) + "\"";
      skip_to(end);
      out.push_back(text.substr(begin, at - begin));
      at += end.size() - 1;
    } else if (text[at] == '"' || (text[at] == '\'' && (at == 0 || !std::isalnum(text[at - 1])))) {
      const size_t begin = at + 1;
      const char quote = text[at];
      for (++at; at < text.size() && text[at] != quote; ++at)
        if (text[at] == '\\') ++at;
      if (quote == '"') out.push_back(text.substr(begin, at - begin));
    }
  }
  return out;
}

std::string names_an_option(const Source& source) {
  static const std::set<std::string> libraries{"base", "tensor", "autograd", "nn",      "optim",  "parallel",
                                               "lab",  "models", "train",    "planner", "verify", "data"};
  static const std::regex option("--[a-z]");
  if (!source.is_code() || !libraries.contains(source.directory())) return "";
  for (const std::string& literal : find_literals(source.text))
    if (std::regex_search(literal, option) && literal != "--connect-timeout")  // curl's
      return "contains \"" + literal + "\"; expected the name of a field between backticks";
  return "";
}

TEST(OptionNames, LibraryErrorsNameFieldsInsteadOfOptions) { EXPECT_EQ(complaints(names_an_option), ""); }

// `tessera --help` lists every environment variable that the program reads, except those set by launchers.
std::string undocumented_variable(const Source& source) {
  static const std::set<std::string> product{"base",     "tensor", "autograd", "nn",    "optim",
                                             "parallel", "lab",    "models",   "train", "planner",
                                             "verify",   "data",   "app",      "hub",   "bench"};
  static const std::string help = read_text(std::string(TESSERA_SOURCE_DIR) + "/app/help/tessera.txt");
  static const std::regex reads("(?:getenv|environment)\\(\"([A-Z_]+)\"\\)"), launchers("(SLURM|PMI|PMIX|OMPI|MV2)_.*");
  if (!source.is_code() || !product.contains(source.directory())) return "";
  for (const std::string& name : first_groups(source.text, reads))
    if (!std::regex_match(name, launchers) && help.find(name) == std::string::npos)
      return "reads the variable " + name + ", which `tessera --help` does not list (app/help/tessera.txt)";
  return "";
}

TEST(OptionNames, HelpListsEveryEnvironmentVariable) {
  EXPECT_EQ(complaints(undocumented_variable), "");
  EXPECT_NE(undocumented_variable({"data/a.cpp", "std::getenv(\"TESSERA_OTHER\");"}), "");
  EXPECT_EQ(undocumented_variable({"data/a.cpp", "std::getenv(\"TESSERA_CACHE\"), environment(\"PMI_RANK\");"}), "");
}

TEST(OptionNames, ChecksDetectViolations) {
  EXPECT_NE(names_an_option({"train/a.cpp", "throw Error(\"--batch: expected 2\");\n"}), "");
  EXPECT_NE(names_an_option({"data/a.cpp", "f('\"', \"x\", \"or --data FILE\");\n"}), "");
  EXPECT_NE(names_an_option({"verify/a.cpp", "auto x = R\"(--seed)\";\n"}), "");
  EXPECT_EQ(names_an_option({"train/a.cpp", "// \"--batch\" is an option\n/* \"--lr\" */ int64_t a = 1'000; --b;\n"}),
            "");
  EXPECT_EQ(names_an_option({"train/a.cpp", "throw FieldError(\"batch\", \"a \\\" -- b\");\n"}), "");
  EXPECT_EQ(names_an_option({"app/a.cpp", "throw Error(\"--batch: expected 2\");\n"}), "");
}

// docs/reading.md: its files exist, are short enough for an afternoon, and contain the names that the page points out.

constexpr int64_t kMaxLinesInAll = 2550;
constexpr size_t kStops = 14;

// The names between backticks.
std::vector<std::string> names_in(const std::string& text) {
  static const std::regex name("`([^`]+)`");
  return first_groups(text, name);
}

// A row of the table: | 3 | files | what to notice |
struct Stop {
  std::vector<std::string> files, names;
};

std::vector<Stop> page_stops(const std::string& page) {
  static const std::regex row(R"(^\| \d+ \| ([^|]+) \| ([^|]+) \|$)", std::regex::multiline);
  std::vector<Stop> out;
  for (const std::smatch& at : matches(page, row)) out.push_back({names_in(at[1]), names_in(at[2])});
  return out;
}

TEST(ReadingGuide, ListsShortExistingFiles) {
  const std::filesystem::path root = TESSERA_SOURCE_DIR;
  const std::vector<Stop> stops = page_stops(read_text(root / "docs/reading.md"));
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
  EXPECT_LE(lines, kMaxLinesInAll);
}

}  // namespace
}  // namespace tessera::conventions
