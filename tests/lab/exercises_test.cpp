// The exercises as a learner meets them: files that are given out, stubs, mistakes and solutions that are built and
// graded.
//
// Building one takes about two seconds, so TESSERA_DRAW draws which are built: a sixth of the stubs and mistakes.
// TESSERA_LAB=all builds everything, TESSERA_LAB=NAME all of one exercise.
#include <fmt/format.h>

#include <algorithm>

#include "lab/check.h"
#include "lab/not_yet.h"
#include "tests/lab/sections.h"
#include "tests/support/errors.h"

namespace tessera::lab {
namespace {

namespace fs = std::filesystem;

// Typical mistakes, three or more for each exercise. They stand in tests/lab/mistakes.txt, which says how.
struct Mistake {
  std::string exercise, name, bound, cause;  // parts of the verdict's lines
  Texts changes;
};

std::vector<Mistake> mistakes() {
  std::vector<Mistake> all;
  for (const Section& s : sections_of("mistakes.txt"))
    all.push_back({s.words.at(0), s.words.at(1), s.words.at(2), s.words.at(3), changes_of(s)});
  return all;
}

std::string product_file(const Exercise& e) { return read_file(fs::path(TESSERA_SOURCE_DIR) / e.file); }

// A file as a learner may write it: with other comments.
std::string commented(std::string text, const Exercise& e) {
  for (const Blank& blank : e.blanks) text.insert(text.find('\n', blanked_part(text, blank).begin), "  // mine");
  return text;
}
std::string solution(const Exercise& e) { return commented(product_file(e), e); }

std::string changed(std::string text, const Mistake& m) {
  for (const auto& [from, to] : m.changes) {
    const size_t at = text.find(from);
    EXPECT_NE(at, std::string::npos) << m.exercise << ", " << m.name << ": the file has no '" << from << "'";
    if (at == std::string::npos) continue;
    EXPECT_EQ(text.find(from, at + 1), std::string::npos) << m.exercise << ", " << m.name << ": twice '" << from << "'";
    text.replace(at, from.size(), to);
  }
  return text;
}

// A file that is handed in, and what its verdict must say. A name that is empty: it is a solution.
struct Submission {
  const Exercise* exercise;
  std::string name, text, bound, cause;
};

bool is_wanted(size_t number, const std::string& exercise) {
  if (const char* only = std::getenv("TESSERA_LAB")) return std::string(only) == "all" || exercise == only;
  const char* draw = std::getenv("TESSERA_DRAW");
  return (number + (draw ? std::stoull(draw) : 0)) % 6 == 0;
}

std::vector<Submission> submissions() {
  std::vector<Submission> out;
  size_t number = 0;
  for (const Exercise& e : exercises())
    if (is_wanted(number++, std::string(e.name)))
      out.push_back({&e, "the stub", blanked_file(product_file(e), e), "broke  nothing", "as it was given out"});
  for (const Exercise& e : exercises())
    if (is_wanted(number++, std::string(e.name))) out.push_back({&e, "", solution(e), "solved", "held"});
  for (const Mistake& m : mistakes())
    if (is_wanted(number++, m.exercise)) {
      const Exercise& e = exercise(m.exercise);
      out.push_back(
          {&e, m.name, commented(changed(product_file(e), m), e), m.bound.empty() ? "" : "broke  " + m.bound, m.cause});
    }
  return out;
}

std::string graded(const Submission& s, size_t number) {
  const TemporaryDirectory folder(temporary_folder() / fmt::format("tessera-lab-{}", number));
  write_file(folder.path() / fs::path(s.exercise->file).filename(), s.text);
  const Verdict verdict = check(*s.exercise, folder.path());
  if (std::getenv("TESSERA_LAB_SHOW")) fmt::print("--- {}: {}\n{}", s.exercise->name, s.name, verdict.text);
  const bool right = verdict.solved == s.name.empty() && has(verdict.text, s.bound) && has(verdict.text, s.cause);
  return right ? ""
               : fmt::format("{}, {}: expected '{}' and '{}', found\n{}", s.exercise->name, s.name, s.bound, s.cause,
                             verdict.text);
}

TEST(Lab, MistakesAreToldApart) {
  const std::vector<Submission> all = submissions();
  ASSERT_FALSE(all.empty());
  EXPECT_EQ(said_of_each(all.size(), [&](size_t i) { return graded(all[i], i); }), "");
}

TEST(Lab, TheProductSolvesEveryExercise) {
  for (const Exercise& e : exercises()) {
    const Verdict verdict = grade(e);
    EXPECT_TRUE(verdict.solved) << verdict.text;
  }
}

// One exercise all the way, as the command does it.
TEST(Lab, AnExerciseIsGivenOutAndSolved) {
  const TemporaryDirectory place(temporary_folder() / "tessera-lab");
  const fs::path folder = place.path() / "my ring's";
  const Exercise& e = exercise("2");
  give_out(e, folder);
  EXPECT_THROW(give_out(e, folder), Error);
  for (const auto& [name, header] : {std::pair("ddp", "ddp.h"), std::pair("zero", "zero.h")}) {
    give_out(exercise(name), place.path() / name);
    EXPECT_TRUE(fs::exists(place.path() / name / header)) << "the page names " << header;
  }
  for (const char* name : {"ring.cpp", "README.md", "compile_commands.json"})
    EXPECT_TRUE(fs::exists(folder / name)) << name;
  write_file(folder / "ring.cpp", solution(e) + "#include <cstdio>\nstatic const int now = puts(\"\\x1b[2Jhere\");\n");
  const Verdict verdict = check(e, folder);
  EXPECT_TRUE(verdict.solved) << verdict.text;
  EXPECT_TRUE(has(verdict.text, "your code printed:\n  \\x1b[2Jhere\n"));
  write_file(folder / "ring.cpp", "int wrong(\n");
  EXPECT_TRUE(has(check(e, folder).text, "broke  compiler"));
  fs::remove(folder / "ring.cpp");
  EXPECT_THROW(check(e, folder), InputError);
}

// A mistake that leaves the numbers right, and others that do not.
TEST(Lab, BoundsGivePoints) {
  const auto spoilt = [](const Exercise& e, size_t number, const std::function<void(std::string&)>& spoil) {
    size_t asked = 0;
    const Ask ask = [&](const auto& local) {
      std::string right = local();
      if (asked++ == number) spoil(right);
      return right;
    };
    return grade(e, ask, 1);
  };
  const Exercise& e = exercise("ring");
  EXPECT_EQ(points(e, spoilt(e, 0, [](std::string&) {}).kept), 6);
  const auto of_bytes = [](std::string& last) { last[last.size() - 8] ^= 1; };  // what the last rank has counted
  const auto of_values = [](std::string& first) { first[8 + 8 + 6] ^= 1; };     // of the first rank's first number
  const Verdict bytes = spoilt(e, 0, of_bytes), values = spoilt(e, 3, of_values);
  EXPECT_EQ(points(e, bytes.kept), 4) << bytes.text;
  EXPECT_EQ(points(e, values.kept), 0) << values.text;
  EXPECT_TRUE(has(json(e, bytes), R"("points":4,"of":6,"bounds":[{"bound":"values","solved":true,"points":4,"of":4},)"
                                  R"({"bound":"bytes","solved":false,"points":0,"of":2}],"broke":"bytes")"));
  for (const Exercise& each : exercises()) EXPECT_EQ(points(each, each.bounds.size()), 6) << each.name;
}

TEST(Lab, EveryExerciseHasThreeMistakesAndAShortPage) {
  int number = 0;
  const std::vector<Mistake>& all = mistakes();
  for (const Exercise& e : exercises()) {
    EXPECT_EQ(e.number, ++number);
    const auto count = std::ranges::count_if(all, [&](const Mistake& m) { return m.exercise == e.name; });
    EXPECT_GE(count, 3) << e.name;
    EXPECT_TRUE(e.page.starts_with(fmt::format("# {}. ", e.number))) << e.name;
    EXPECT_LE(std::ranges::count(e.page, '\n'), 70) << e.name << ": two screens";
    for (const Blank& blank : e.blanks) {
      const std::string_view before = blank.function.substr(0, blank.function.find('('));
      const std::string_view name = before.substr(before.find_last_of(" :") + 1);
      EXPECT_TRUE(has(e.page, name)) << e.name;
    }
  }
  EXPECT_GE(number, 10);
}

TEST(Lab, EveryMistakeIsAChangeOfItsFile) {
  for (const Mistake& m : mistakes())
    EXPECT_NE(changed(product_file(exercise(m.exercise)), m), product_file(exercise(m.exercise)));
}

// Bodies are found, and nothing else is touched.

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

std::string part_of(const Blank& blank, const std::string& text = kText) {
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
    const std::string text = product_file(e);
    std::vector<std::string> bodies;
    for (const Blank& blank : e.blanks) {
      bodies.push_back(part_of(blank, text));
      EXPECT_FALSE(bodies.back().empty()) << e.name;
    }
    EXPECT_EQ(filled_file(text, e, bodies), text) << e.name;
    const std::string given = blanked_file(text, e);
    for (const std::string& body : bodies) EXPECT_EQ(given.find(body), std::string::npos) << e.name;
  }
}

}  // namespace
}  // namespace tessera::lab
