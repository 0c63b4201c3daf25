// Bodies are found, and nothing else is touched.
#include <gtest/gtest.h>

#include "data/files.h"
#include "lab/check.h"
#include "tensor/error.h"

namespace tessera::lab {
namespace {

constexpr const char* kText = R"(#include <a>
int twice(int x);  // {
struct S {
  // f(
  int f(char c = '}') const {
    if (c == '{') return 1'000;  // }
    const char* s = "}\"";
    /* } */
    return 2;
  }
};
int twice(int x) {
  return 2 * x;
}
)";

std::string part_of(const Blank& blank) {
  const std::string text = kText;
  const Part p = blanked_part(text, blank);
  return text.substr(p.begin, p.end - p.begin);
}

TEST(FunctionText, ABodyIsWhatIsBetweenItsBraces) {
  EXPECT_EQ(part_of({"int twice("}), "  return 2 * x;\n");
  EXPECT_TRUE(part_of({"int f("}).starts_with("    if (c"));
  EXPECT_TRUE(part_of({"int f("}).ends_with("    return 2;\n"));
  EXPECT_EQ(part_of({"int f(", "return"}), "    return 2;\n");
}

TEST(FunctionText, WhatIsNotThereIsSaid) {
  EXPECT_THROW(part_of({"int thrice("}), Error);
  EXPECT_THROW(part_of({"int twice(", "throw"}), Error);
  EXPECT_THROW(blanked_part(std::string(kText) + kText, {"int twice("}), Error);
}

TEST(FunctionText, AFileThatIsFilledAgainIsTheFile) {
  for (const Exercise& e : exercises()) {
    const std::string text = read_file(std::string(TESSERA_SOURCE_DIR) + "/" + std::string(e.file));
    std::vector<std::string> bodies;
    for (const Blank& blank : e.blanks) {
      const Part p = blanked_part(text, blank);
      EXPECT_LT(p.begin, p.end) << e.name;
      bodies.push_back(text.substr(p.begin, p.end - p.begin));
    }
    EXPECT_EQ(filled_file(text, e, bodies), text) << e.name;
    const std::string given = blanked_file(text, e);
    for (const std::string& body : bodies) EXPECT_EQ(given.find(body), std::string::npos) << e.name;
  }
}

}  // namespace
}  // namespace tessera::lab
