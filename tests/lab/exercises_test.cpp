// Exercises end to end: created files; stubs, mistakes and solutions that are built and graded.
//
// A build takes about two seconds, so TESSERA_DRAW selects a sixth of the stubs, solutions and mistakes.
// TESSERA_LAB=all builds everything, TESSERA_LAB=NAME everything of one exercise.
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <functional>
#include <map>
#include <set>
#include <sstream>
#include <string>
#include <string_view>
#include <tuple>
#include <vector>

#include "lab/check.h"
#include "lab/not_yet.h"
#include "parallel/comm/communicator.h"
#include "parallel/pipeline/schedules.h"
#include "parallel/pipeline/validate.h"
#include "tests/lab/sections.h"
#include "tests/support/errors.h"

namespace tessera::lab {
namespace {

namespace fs = std::filesystem;

// Typical mistakes, at least three per exercise; format: see tests/lab/mistakes.txt.
struct Mistake {
  std::string exercise, name, bound, cause;  // bound, cause: substrings of the verdict
  Texts changes;
};

std::vector<Mistake> mistakes() {
  std::vector<Mistake> all;
  for (const Section& s : read_sections("mistakes.txt"))
    all.push_back({s.fields.at(0), s.fields.at(1), s.fields.at(2), s.fields.at(3), find_changes(s)});
  return all;
}

std::string product_file(const Exercise& e) { return read_file(fs::path(TESSERA_SOURCE_DIR) / e.file); }

// Adds comments, so that the file differs from the original text.
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

// A submitted file and substrings of its verdict. Empty name: a solution.
struct Submission {
  const Exercise* exercise;
  std::string name, text, bound, cause;
};

bool is_wanted(size_t number, const std::string& exercise) {
  if (const char* only = std::getenv("TESSERA_LAB")) return std::string(only) == "all" || exercise == only;
  const char* offset = std::getenv("TESSERA_DRAW");
  return (number + (offset ? std::stoull(offset) : 0)) % 6 == 0;
}

std::vector<Submission> submissions() {
  std::vector<Submission> out;
  size_t number = 0;
  for (const Exercise& e : exercises())
    if (is_wanted(number++, std::string(e.name)))
      out.push_back({&e, "the stub", blanked_file(product_file(e), e), "failed nothing", "not implemented yet"});
  for (const Exercise& e : exercises())
    if (is_wanted(number++, std::string(e.name))) out.push_back({&e, "", solution(e), "solved", "passed"});
  for (const Mistake& m : mistakes())
    if (is_wanted(number++, m.exercise)) {
      const Exercise& e = exercise(m.exercise);
      out.push_back(
          {&e, m.name, commented(changed(product_file(e), m), e), m.bound.empty() ? "" : "failed " + m.bound, m.cause});
    }
  return out;
}

std::string graded(const Submission& s, size_t number) {
  const TemporaryDirectory directory(temporary_directory() / fmt::format("tessera-lab-{}", number));
  write_file(directory.path() / fs::path(s.exercise->file).filename(), s.text);
  const Verdict verdict = check(*s.exercise, directory.path());
  if (std::getenv("TESSERA_LAB_SHOW")) fmt::print("--- {}: {}\n{}", s.exercise->name, s.name, verdict.text);
  const bool right = verdict.solved == s.name.empty() && has(verdict.text, s.bound) && has(verdict.text, s.cause);
  return right ? ""
               : fmt::format("{}, {}: expected '{}' and '{}', found\n{}", s.exercise->name, s.name, s.bound, s.cause,
                             verdict.text);
}

TEST(Lab, DiagnosesMistakes) {
  const std::vector<Submission> all = submissions();
  ASSERT_FALSE(all.empty());
  EXPECT_EQ(concat_messages(all.size(), [&](size_t i) { return graded(all[i], i); }), "");
}

TEST(Lab, OriginalCodeSolvesEveryExercise) {
  for (const Exercise& e : exercises()) {
    const Verdict verdict = grade(e);
    EXPECT_TRUE(verdict.solved) << verdict.text;
  }
}

TEST(Lab, CreatesAndGradesExercises) {
  const TemporaryDirectory place(temporary_directory() / "tessera-lab");
  const fs::path directory = place.path() / "my ring's";
  const Exercise& e = exercise("2");
  give_out(e, directory);
  EXPECT_THROW(give_out(e, directory), Error);
  for (const auto& [name, header] : {std::pair("ddp", "ddp.h"), std::pair("zero", "zero.h")}) {
    give_out(exercise(name), place.path() / name);
    EXPECT_TRUE(fs::exists(place.path() / name / header)) << "the page names " << header;
  }
  for (const char* name : {"ring.cpp", "README.md", "compile_commands.json"})
    EXPECT_TRUE(fs::exists(directory / name)) << name;
  write_file(directory / "ring.cpp",
             solution(e) + "#include <cstdio>\nstatic const int now = puts(\"\\x1b[2Jhere\");\n");
  const Verdict verdict = check(e, directory);
  EXPECT_TRUE(verdict.solved) << verdict.text;
  EXPECT_TRUE(has(verdict.text, "your code printed:\n  \\x1b[2Jhere\n"));
  write_file(directory / "ring.cpp", "int wrong(\n");
  EXPECT_TRUE(has(check(e, directory).text, "failed compiler"));
  fs::remove(directory / "ring.cpp");
  EXPECT_THROW(check(e, directory), InputError);
}

// Code identical to Tessera's (except whitespace and comments) is reported in a note and does not affect the result.
TEST(Lab, GradesCopiedCodeWithNote) {
  const Exercise& e = exercise("1f1b");
  const std::string product = product_file(e), loop = "for (int i = 0; i < ahead; ++i)";
  std::string spaced = product, own = product;
  spaced.replace(spaced.find(loop), loop.size(), "for (int i = 0;  /* \" */ i < ahead; ++ i)  // warm-up\n");
  own.replace(own.find(loop), loop.size(), "for (int i = 0; i != ahead; ++i)");
  const TemporaryDirectory place(temporary_directory() / "tessera-lab");
  for (const auto& [text, notes] : {std::pair(product, 1U), {spaced, 1U}, {own, 0U}}) {
    write_file(place.path() / "one_f_one_b.cpp", text);
    const Verdict verdict = check(e, place.path());
    EXPECT_TRUE(verdict.solved) << verdict.text;
    ASSERT_EQ(verdict.notes.size(), notes) << verdict.text;
    EXPECT_EQ(verdict.score.at(0), (std::pair<std::string, double>("bytes_of_text", without_blanks(text).size())));
    const std::string note =
        "contains code that is identical to Tessera's up to comments and whitespace: one_f_one_b()";
    EXPECT_EQ(has(verdict.text, "  note   your file " + note + "\n"), notes == 1);
    EXPECT_EQ(has(json(e, verdict), R"("notes":[")" + note + R"("]})"), notes == 1) << json(e, verdict);
  }
  EXPECT_EQ(without_blanks("a = 1'000 /* b\n */ + \"x // y\" + '\"';  // c"), "a=1'000+\"x // y\"+'\"';");
}

// Answers with one injected error, without a build.

// Mirrors the serialized struct of lab/grade/gradients.cpp.
struct TensorSlice {
  size_t parameter = 0;
  Range range;
  std::vector<double> elements;
  auto fields() { return std::tie(parameter, range, elements); }
};
struct Observed {
  std::vector<std::vector<TensorSlice>> gradients;
  std::vector<TensorSlice> values;
  std::vector<double> requested, span = {0, 0};  // span: of the last micro-batch, serialized without a length
  OpCounts counts{};
  int64_t left = 0, full = 0;
  auto fields() { return std::tie(gradients, values, requested, span[0], span[1], counts, left, full); }
};

using Ranks = std::vector<Observed>;
using Lists = std::vector<std::vector<Action>>;
using Change = std::function<void(std::string& answer)>;

template <class T>
Change compute_change(const std::function<void(T& ranks)>& f) {
  return [f](std::string& answer) {
    std::string_view left = answer;
    T ranks = take<T>(left);
    f(ranks);
    answer = packed(ranks);
  };
}

// Adds to the value at byte `place`, relative to the end if negative.
template <class T>
Change plus(std::ptrdiff_t place, T more) {
  return [=](std::string& answer) {
    const size_t at = static_cast<size_t>(place < 0 ? std::ssize(answer) + place : place);
    std::string_view left = std::string_view(answer).substr(at);
    answer.replace(at, sizeof(T), packed(take<T>(left) + more));
  };
}

Change schedule(Schedule (*make)(int ranks, int microbatches)) {
  return compute_change<Lists>(
      [make](Lists& l) { l = make(static_cast<int>(l.size()), l[0].back().microbatch + 1).actions; });
}

TEST(Lab, EachFailedCheckScoresExactPoints) {
  const auto sent = [](Op op, int64_t bytes) {
    return compute_change<Ranks>([=](Ranks& all) { all.back().counts[static_cast<size_t>(op)].sent += bytes; });
  };
  const Change gradient = compute_change<Ranks>([](Ranks& all) { all[0].gradients[1][0].elements[0] += 1; });
  const Change value = compute_change<Ranks>([](Ranks& all) { all[1].values[0].elements[0] += 1; });
  const Change calls = compute_change<Ranks>([](Ranks& all) { all[0].counts[0].calls += std::ssize(all); });
  const Change early = compute_change<Ranks>([](Ranks& all) { all[0].requested[0] = all[0].span[0] - 1; });
  const Change late = compute_change<Ranks>([](Ranks& all) { all[0].requested[0] = all[0].span[1] + 1; });
  const Change last = plus<int64_t>(-8, 8);
  const Change nan = plus<double>(16, NAN);
  // Rank 0 runs B twice, then F twice: same number in flight, larger bubble.
  const Change slow_1f1b = compute_change<Lists>([](Lists& l) { std::swap(l[0][l.size() + 1], l[0][l.size() + 2]); });
  // W of earlier micro-batches delays I.
  const Change slow_zb_h1 = compute_change<Lists>([](Lists& l) {
    for (size_t i = 1; i < l[1].size(); ++i)
      if (l[1][i].what == PassKind::W && l[1][i].microbatch < l[1][i - 1].microbatch) std::swap(l[1][i], l[1][i - 1]);
  });
  struct Row {
    const char *exercise, *bound;
    size_t answer;
    int points;
    Change change;
  };
  std::map<std::string_view, std::set<std::string_view>> refused;
  for (const Row& row : std::vector<Row>{
           {"messages", "values", 29, 0, nan},
           {"messages", "bytes", 0, 4, plus<int64_t>(-16, 4)},
           {"messages", "bytes", 29, 4, plus<int64_t>(-24, -4)},
           {"ring", "values", 0, 0, nan},
           {"ring", "bytes", 0, 4, plus<int64_t>(-24, 4)},
           {"ring", "bytes", 0, 4, plus<int64_t>(-16, -4)},
           {"ring", "bytes", 89, 4, last},
           {"ddp", "values", 4, 0, gradient},
           {"ddp", "calls", 0, 3, calls},
           {"ddp", "bytes", 1, 4, sent(Op::all_reduce, 4)},
           {"ddp", "bytes", 1, 4, sent(Op::broadcast, 4)},
           {"ddp", "overlap", 4, 5, early},
           {"ddp", "overlap", 2, 5, late},
           {"zero", "values", 5, 0, gradient},
           {"zero", "values", 0, 0, value},
           {"zero", "bytes", 0, 3, sent(Op::reduce_scatter, 4)},
           {"zero", "bytes", 2, 3, sent(Op::all_gather, -4)},
           {"zero", "bytes", 4, 3, sent(Op::all_reduce, 4)},
           {"zero", "bytes", 5, 3, sent(Op::broadcast, 4)},
           {"zero", "memory", 5, 5, plus<int64_t>(-16, 4)},
           {"f-and-g", "values", 0, 0, nan},
           {"f-and-g", "bytes", 0, 4, plus<int64_t>(-16, 8)},
           {"f-and-g", "bytes", 0, 4, last},
           {"vocabulary", "values", 11, 0, plus<double>(8, NAN)},
           {"vocabulary", "bytes", 11, 4, last},
           {"1f1b", "schedule", 0, 0, compute_change<Lists>([](Lists&l) { l[0].pop_back(); })},
           {"1f1b", "memory", 31, 2, schedule(gpipe)},
           {"1f1b", "memory", 0, 2, schedule(naive)},
           {"1f1b", "bubble", 31, 4, slow_1f1b},
           {"zb-h1", "schedule", 0, 0, schedule(one_f_one_b)},
           {"zb-h1", "memory", 31, 2, schedule(zb_h2)},
           {"zb-h1", "memory", 0, 2, schedule([](int p, int m) { return split_backward(one_f_one_b(p, m)); })},
           {"zb-h1", "bubble", 31, 4, slow_zb_h1},
           {"ring-attention", "values", 0, 0, nan},
           {"ring-attention", "bytes", 13, 4, last},
           {"clipping", "values", 0, 0, nan},
           {"experts", "values", 0, 0, nan},
           {"experts", "bytes", 3, 4, last}}) {
    const Exercise& e = exercise(row.exercise);
    size_t asked = 0;
    const Ask ask = [&](const auto& local) {
      std::string answer = local();
      if (asked++ == row.answer) row.change(answer);
      return answer;
    };
    const Verdict verdict = grade(e, ask, 1);
    EXPECT_EQ(verdict.wrong.bound, row.bound) << e.name << ", answer " << row.answer << "\n" << verdict.text;
    EXPECT_EQ(points(e.bounds, verdict.passed), row.points) << verdict.text;
    refused[e.name].insert(row.bound);
  }
  for (const Exercise& e : exercises()) {
    EXPECT_EQ(refused[e.name].size(), e.bounds.size()) << e.name;
    EXPECT_EQ(points(e.bounds, e.bounds.size()), 6) << e.name;
  }
  EXPECT_TRUE(has(json(exercise("ring"), tessera::lab::refused(exercise("ring"), {"bytes", "", ""}, 1)),
                  R"("points":4,"of":6,"bounds":[{"bound":"values","solved":true,"points":4,"of":4},)"
                  R"({"bound":"bytes","solved":false,"points":0,"of":2}],"broke":"bytes")"));
}

// Sources and includes that a compiler would read forever are rejected without compiling.
TEST(Lab, RejectsNonRegularSourceFiles) {
  const TemporaryDirectory place(temporary_directory() / "tessera-lab");
  const fs::path source = place.path() / "ring.cpp", pipe = place.path() / "pipe.h";
  ASSERT_EQ(::mkfifo(pipe.c_str(), 0600), 0);
  const auto refused = [&](const std::string& message) {
    const std::string error = error_message([&] { check(exercise("ring"), place.path()); }, Status::input);
    EXPECT_TRUE(has(error, "ring.cpp") && has(error, message)) << error;
    fs::remove_all(source);
  };
  fs::create_directory(place.path() / "build");
  for (const auto& [to, message] :
       {std::pair("pipe.h", "not a regular file"), {"/dev/zero", "not a regular file"}, {"build", "is a directory"}})
    fs::create_symlink(to, source), refused(message);
  fs::create_symlink("ring.cpp", source), refused("symbolic links");
  write_file(source, std::string((1 << 20) + 1, ' ')), refused("1048577 bytes; expected at most 1048576");
  for (const char* name : {"pipe.h", "/dev/zero", "build"}) {
    write_file(source, fmt::format("# include \"{}\"\n", name));
    refused(fmt::format("includes {}, which is not a regular file", name));
  }
}

TEST(Lab, FindsSubmissionsOneDirectoryDeep) {
  const TemporaryDirectory place(temporary_directory() / "tessera-class");
  for (const char* file : {"ring.cpp", "ada/ring.cpp", "ada/my zero/zero.cpp", "ada/a/b/ddp.cpp", "bob/ring.txt"}) {
    make_directories((place.path() / file).parent_path());
    write_file(place.path() / file, "");
  }
  fs::create_directory(place.path() / "bob/zero.cpp");  // found by name and rejected later
  std::string found;
  for (const auto& [learner, files] : handed_in(place.path())) {
    found += learner + ":";
    for (const lab::Submission& h : files)
      found += fmt::format(" {} in {},", h.exercise->name, fs::relative(h.directory, place.path()).string());
  }
  EXPECT_EQ(found, "ada: ring in ada, zero in ada/my zero,bob: zero in bob,");
  EXPECT_THROW(handed_in(place.path() / "ring.cpp"), InputError);
}

// tessera_exercises in cmake/tessera.cmake lists these files, because in a unity build the compile command of any other
// file compiles several files.
TEST(Lab, FilesOfExercisesAreCompiledSeparately) {
  std::set<std::string> files, listed;
  for (const Exercise& e : exercises()) files.emplace(e.file);
  std::istringstream list(TESSERA_EXERCISES);
  for (std::string file; list >> file;) listed.insert(file);
  EXPECT_EQ(listed, files);
}

TEST(Lab, EveryExerciseHasThreeMistakesAndAShortPage) {
  int number = 0;
  const std::vector<Mistake>& all = mistakes();
  for (const Exercise& e : exercises()) {
    EXPECT_EQ(e.number, ++number);
    const auto count = std::ranges::count_if(all, [&](const Mistake& m) { return m.exercise == e.name; });
    EXPECT_GE(count, 3) << e.name;
    EXPECT_TRUE(e.page.starts_with(fmt::format("# {}. ", e.number))) << e.name;
    EXPECT_LE(std::ranges::count(e.page, '\n'), 82) << e.name << ": two screens";
    EXPECT_TRUE(has(e.page, "## The same in PyTorch\n\n```python\n")) << e.name;
    for (const Blank& blank : e.blanks) {
      const std::string_view before = blank.function.substr(0, blank.function.find('('));
      const std::string_view name = before.substr(before.find_last_of(" :") + 1);
      EXPECT_TRUE(has(e.page, name)) << e.name;
    }
  }
  EXPECT_GE(number, 10);
}

TEST(Lab, EveryMistakeChangesItsFile) {
  for (const Mistake& m : mistakes())
    EXPECT_NE(changed(product_file(exercise(m.exercise)), m), product_file(exercise(m.exercise)));
}

// Location of function bodies.

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

std::string fill_in_text(const Blank& blank, const std::string& text = kText) {
  const Part p = blanked_part(text, blank);
  return text.substr(p.begin, p.end - p.begin);
}

TEST(FunctionText, FindsBodyBetweenBraces) {
  EXPECT_EQ(fill_in_text({"int twice("}), "  return 2 * x;\n");
  EXPECT_TRUE(fill_in_text({"int f("}).starts_with("    if (c"));
  EXPECT_TRUE(fill_in_text({"int f("}).ends_with("    return 2;\n"));
  EXPECT_EQ(fill_in_text({"int f(", "return"}), "    return 2;\n");
}

TEST(FunctionText, ReportsMissingFunctions) {
  EXPECT_THROW(fill_in_text({"int thrice("}), Error);
  EXPECT_THROW(fill_in_text({"int twice(", "throw"}), Error);
  EXPECT_THROW(blanked_part(std::string(kText) + kText, {"int twice("}), Error);
}

TEST(FunctionText, RefilledFileEqualsOriginal) {
  for (const Exercise& e : exercises()) {
    const std::string text = product_file(e);
    std::vector<std::string> bodies;
    for (const Blank& blank : e.blanks) {
      bodies.push_back(fill_in_text(blank, text));
      EXPECT_FALSE(bodies.back().empty()) << e.name;
    }
    EXPECT_EQ(filled_file(text, e, bodies), text) << e.name;
    const std::string given = blanked_file(text, e);
    for (const std::string& body : bodies) EXPECT_EQ(given.find(body), std::string::npos) << e.name;
  }
}

}  // namespace
}  // namespace tessera::lab
