// Holds the law of words: a library names fields (`microbatches`), and the command line alone says options
// (--microbatches). So no string of a library below app/ has the text of an option in it.
#include <gtest/gtest.h>

#include "tests/house/sources.h"

namespace tessera::house {
namespace {

// The string literals of a file, as they are written; comments and characters are passed over.
std::vector<std::string> literals_of(const std::string& text) {
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

std::string says_an_option(const Source& source) {
  static const std::set<std::string> libraries{"tensor", "autograd", "nn",      "optim",  "parallel", "lab",
                                               "models", "train",    "planner", "verify", "data"};
  static const std::regex option("--[a-z]");
  if (!source.is_code() || !libraries.contains(source.folder())) return "";
  for (const std::string& literal : literals_of(source.text))
    if (std::regex_search(literal, option) && literal != "--connect-timeout")  // curl's
      return "says \"" + literal + "\"; expected the name of a field between backticks";
  return "";
}

TEST(Words, LibrariesNameFieldsAndNoOptions) { EXPECT_EQ(complaints(says_an_option), ""); }

// Whoever reads `tessera --help` knows of every variable that the program reads, but for those that launchers set.
std::string reads_what_no_help_names(const Source& source) {
  static const std::set<std::string> product{"tensor", "autograd", "nn",     "optim", "parallel", "lab", "models",
                                             "train",  "planner",  "verify", "data",  "app",      "hub", "bench"};
  static const std::string help = read_text(std::string(TESSERA_SOURCE_DIR) + "/app/command_line.cpp");
  static const std::regex reads("(?:getenv|environment)\\(\"([A-Z_]+)\"\\)"), launchers("(SLURM|PMI|PMIX|OMPI|MV2)_.*");
  if (!source.is_code() || !product.contains(source.folder())) return "";
  for (std::sregex_iterator it(source.text.begin(), source.text.end(), reads), end; it != end; ++it)
    if (const std::string name = (*it)[1]; !std::regex_match(name, launchers) && help.find(name) == std::string::npos)
      return "reads the variable " + name + ", which is not in the list of `tessera --help` (app/command_line.cpp)";
  return "";
}

TEST(Words, HelpNamesEveryVariable) {
  EXPECT_EQ(complaints(reads_what_no_help_names), "");
  EXPECT_NE(reads_what_no_help_names({"data/a.cpp", "std::getenv(\"TESSERA_OTHER\");"}), "");
  EXPECT_EQ(reads_what_no_help_names({"data/a.cpp", "std::getenv(\"TESSERA_CACHE\"), environment(\"PMI_RANK\");"}), "");
}

TEST(Words, ViolationsAreSeen) {
  EXPECT_NE(says_an_option({"train/a.cpp", "throw Error(\"--batch: expected 2\");\n"}), "");
  EXPECT_NE(says_an_option({"data/a.cpp", "f('\"', \"x\", \"or --data FILE\");\n"}), "");
  EXPECT_NE(says_an_option({"verify/a.cpp", "auto x = R\"(--seed)\";\n"}), "");
  EXPECT_EQ(says_an_option({"train/a.cpp", "// \"--batch\" is an option\n/* \"--lr\" */ int64_t a = 1'000; --b;\n"}),
            "");
  EXPECT_EQ(says_an_option({"train/a.cpp", "throw FieldError(\"batch\", \"a \\\" -- b\");\n"}), "");
  EXPECT_EQ(says_an_option({"app/a.cpp", "throw Error(\"--batch: expected 2\");\n"}), "");
}

}  // namespace
}  // namespace tessera::house
