// The properties of a parameter stand in nn/module.h: code outside of tests compares no name with a string to find out
// which parameter, or which unit, it has before it.
#include <gtest/gtest.h>

#include "tests/house/sources.h"

namespace tessera::house {
namespace {

// The names that models and layers give: of parameters, and of the modules that they stand in.
std::set<std::string> given_names(const std::vector<Source>& sources) {
  static const std::regex given(R"re((?:param|child<\w+>)\("(\w+)\.?")re");
  std::set<std::string> names;
  for (const Source& source : sources) {
    if (source.folder() != "nn" && source.folder() != "models") continue;
    for (std::sregex_iterator it(source.text.begin(), source.text.end(), given), end; it != end; ++it)
      names.insert((*it)[1]);
  }
  return names;
}

// A comparison with a literal in which one of the names stands between dots.
std::string compares_a_name(const Source& source, const std::set<std::string>& names) {
  static const std::regex literal(
      R"re((?:[=!]=\s*|\b(?:r?find|starts_with|ends_with|compare)\()"([\w.]+)"|"([\w.]+)"\s*[=!]=)re");
  static const std::regex word(R"(\w+)");
  if (source.folder() == "tests" || !source.is_code()) return "";
  for (std::sregex_iterator it(source.text.begin(), source.text.end(), literal), end; it != end; ++it) {
    const std::string text = (*it)[1].matched ? (*it)[1] : (*it)[2];
    for (std::sregex_iterator w(text.begin(), text.end(), word), last; w != last; ++w)
      if (names.contains(w->str())) return "compares with \"" + text + "\"; ask the Parameter";
  }
  return "";
}

TEST(Names, AreNotComparedWithStrings) {
  const std::set<std::string> names = given_names(all_sources());
  EXPECT_TRUE(names.contains("tokens") && names.contains("head") && names.contains("weight") && names.contains("qkv"));
  EXPECT_EQ(complaints([&](const Source& source) { return compares_a_name(source, names); }), "");
}

TEST(Names, ComparisonsAreSeen) {
  const std::set<std::string> names =
      given_names({{"models/a.cpp", "x(child<Embedding>(\"head\", 3)), y(param(\"weight\", {1}))"}});
  EXPECT_EQ(names, (std::set<std::string>{"head", "weight"}));
  EXPECT_NE(compares_a_name({"app/a.cpp", "if (unit.name == \"head\") f();"}, names), "");
  EXPECT_NE(compares_a_name({"app/a.cpp", "if (\"head\" != unit.name) f();"}, names), "");
  EXPECT_NE(compares_a_name({"app/a.cpp", "p.name.ends_with(\"head.weight\")"}, names), "");
  EXPECT_EQ(compares_a_name({"app/a.cpp", "if (mode == \"ring\") f(\"head\");"}, names), "");
  EXPECT_EQ(compares_a_name({"tests/a.cpp", "EXPECT_TRUE(name == \"head\");"}, names), "");
}

}  // namespace
}  // namespace tessera::house
