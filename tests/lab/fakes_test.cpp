// Fakes (tests/lab/fakes.txt): files that try to pass without solving the exercise, or to do harm. Most are submitted
// for every exercise, some for one. A build takes one or two seconds, so TESSERA_DRAW selects a fourteenth of them;
// TESSERA_FAKES=all builds all, TESSERA_FAKES=TEXT those whose name contains the text.
#include <fcntl.h>
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <map>
#include <string>
#include <vector>

#include "lab/check.h"
#include "tests/lab/sections.h"

namespace tessera::lab {
namespace {

namespace fs = std::filesystem;

struct Fake {
  std::string name, bound, exercise, text;  // exercise: empty for all; text: full file, unless empty
  std::vector<std::string> bodies;
  Texts changes;
};

const std::string kIncludes =
    "#include <dlfcn.h>\n#include <fcntl.h>\n#include <signal.h>\n#include <stdio.h>\n#include <stdlib.h>\n"
    "#include <string.h>\n#include <sys/mman.h>\n#include <sys/ptrace.h>\n#include <sys/socket.h>\n"
    "#include <sys/stat.h>\n#include <sys/syscall.h>\n#include <sys/uio.h>\n#include <unistd.h>\n"
    "#include <algorithm>\n#include <stdexcept>\n#include <thread>\n#include <vector>\n";

std::string replaced(std::string text, const Texts& words) {
  for (const auto& [from, to] : words)
    for (size_t at = 0; (at = text.find(from, at)) != std::string::npos; at += to.size())
      text.replace(at, from.size(), to);
  return text;
}

std::vector<Fake> fakes() {
  std::vector<Fake> all;
  for (const Section& s : read_sections("fakes.txt")) {
    Fake fake{s.fields.at(0), s.fields.at(1), s.fields.size() > 2 ? s.fields[2] : "", s.texts[0].second, {},
              find_changes(s)};
    for (const auto& [kind, text] : s.texts) {
      if (kind == "body") fake.bodies.push_back(text);
      if (kind == "at the start")
        fake.text = "INCLUDES__attribute__((constructor)) static void now() {\n" + text + "}\nGIVEN";
    }
    all.push_back(fake);
  }
  return all;
}

std::string named(const Exercise& e, const Fake& fake) { return fmt::format("{}, {}", e.name, fake.name); }

// The submitted file.
std::string write_fake(const Exercise& e, const Fake& fake, const fs::path& directory) {
  std::string product = read_file(fs::path(TESSERA_SOURCE_DIR) / e.file), text = fake.text;
  const std::string given = blanked_file(product, e);
  std::vector<std::string> bodies;
  for (size_t i = 0; i < e.blanks.size() && !fake.bodies.empty(); ++i) {
    const std::string& body = fake.bodies[std::min(i, fake.bodies.size() - 1)];
    const Part part = blanked_part(product, e.blanks[i]);
    const bool nothing = e.blanks[i].function.starts_with("void ");
    bodies.push_back(body.empty() ? product.substr(part.begin, part.end - part.begin)
                                  : replaced(body, {{"RETURN", nothing ? "return;\n" : "return {};\n"}}));
  }
  for (const auto& [from, to] : fake.changes) {
    EXPECT_NE(product.find(from), std::string::npos) << named(e, fake) << ": no '" << from << "'";
    product = replaced(product, {{from, to}});
  }
  if (!fake.changes.empty())  // differs from the original text
    for (const Blank& blank : e.blanks)
      product.insert(product.find('\n', blanked_part(product, blank).begin), "  // mine");
  if (!bodies.empty() || !fake.changes.empty())
    text = "INCLUDES" + (bodies.empty() ? product : filled_file(product, e, bodies));
  return replaced(text, {{"GIVEN", given},
                         {"INCLUDES\n", kIncludes},
                         {"INCLUDES", kIncludes},
                         {"FOLDER", directory.string()},
                         {"SOURCE", TESSERA_SOURCE_DIR},
                         {"FILE", std::string(e.file)},
                         {"NUMBER", std::to_string(e.number)},
                         {"NAME", std::string(e.name)}});
}

// Empty if the fake is rejected with the expected reason and did no harm.
std::string refused_fake(const Exercise& e, const Fake& fake) {
  const TemporaryDirectory directory(temporary_directory() / "tessera-fake");
  const fs::path untouched = directory.path() / "kept", notes = directory.path() / "build/learner.d";
  const std::string text = write_fake(e, fake, directory.path());
  write_file(directory.path() / fs::path(e.file).filename(), text);
  write_file(untouched, "");
  fs::create_symlink(fs::path(TESSERA_SOURCE_DIR) / e.file, directory.path() / "linked.inc");
  if (text.ends_with("// NOTES\n")) fs::create_directory(notes.parent_path()), fs::create_symlink("/dev/null", notes);
  const int held = ::open(untouched.c_str(), O_WRONLY | O_CLOEXEC);  // a descriptor that the sandbox must not inherit
  const fs::perms before = fs::status(untouched).permissions();
  const Verdict verdict = check(e, directory.path(), fake.bound == "time" ? 3 : kGradingSeconds);
  ::close(held);
  const std::string bound = fake.bound == "any" ? "" : fmt::format("  failed {}\n", fake.bound);
  const std::string first = fmt::format("exercise {}, {}: not yet\n{}", e.number, e.name, bound);
  const bool noted = verdict.solved && verdict.notes.size() == 1 && verdict.notes[0].starts_with("includes ");
  const bool sound = fake.bound == "noted"
                         ? noted
                         : !verdict.solved && (verdict.passed == 0 || !fake.exercise.empty()) &&
                               verdict.text.starts_with(first) && verdict.text.find('\x1b') == std::string::npos &&
                               verdict.text.find("\nexercise") == verdict.text.npos;
  const bool harmless = fs::exists(untouched) && fs::file_size(untouched) == 0 &&
                        fs::status(untouched).permissions() == before && !fs::exists(directory.path() / "made") &&
                        (!fs::exists(directory.path() / "build/output.txt") ||
                         fs::file_size(directory.path() / "build/output.txt") <= uintmax_t{1} << 20);
  if (std::getenv("TESSERA_LAB_SHOW")) fmt::print("--- {}\n{}", named(e, fake), verdict.text);
  return sound && harmless ? ""
                           : fmt::format("{}: expected '{}'{}, found\n{}\n", named(e, fake), first,
                                         harmless ? "" : " and no harm", verdict.text);
}

TEST(FakeSubmissions, AreRejected) {
  std::vector<std::pair<const Exercise*, const Fake*>> all;
  const char *only = std::getenv("TESSERA_FAKES"), *offset = std::getenv("TESSERA_DRAW");
  size_t number = offset ? std::stoull(offset) : 0;
  const std::vector<Fake> every = fakes();
  for (const Exercise& e : exercises()) {
    size_t of_this = 0;
    for (const Fake& fake : every) {
      if (!fake.exercise.empty() && fake.exercise != e.name) continue;
      ++of_this;
      if (only ? std::string(only) == "all" || named(e, fake).find(only) != std::string::npos : number++ % 14 == 0)
        all.emplace_back(&e, &fake);
    }
    EXPECT_GE(of_this, 30U) << e.name;
  }
  ASSERT_FALSE(all.empty());
  if (only) fmt::print("{} fakes\n", all.size());
  EXPECT_EQ(concat_messages(all.size(), [&](size_t i) { return refused_fake(*all[i].first, *all[i].second); }), "");
}

// Constant bytes for every request.
TEST(FakeSubmissions, MalformedAnswersAreRejected) {
  for (const Exercise& e : exercises())
    for (const size_t size : {0, 8, 64, 4096, 100000})
      for (const char byte : {'\0', '\1', '\x7f', '\xff'}) {
        const Verdict verdict = grade(
            e, [&](const auto&) { return std::string(size, byte); }, 1);
        EXPECT_FALSE(verdict.solved) << e.name;
        EXPECT_EQ(verdict.passed, 0U) << e.name;
      }
}

// Correct answers that are replayed, truncated, half zeroed, or of another seed.
TEST(FakeSubmissions, ReplayedAndTruncatedAnswersAreRejected) {
  for (const Exercise& e : exercises()) {
    std::vector<std::string> before;
    const Ask records = [&](const auto& local) { return before.emplace_back(local()); };
    EXPECT_TRUE(grade(e, records, 1).solved) << e.name;
    size_t asked = 0;
    const Ask replays = [&](const auto&) { return before.at(asked++ % before.size()); };
    EXPECT_FALSE(grade(e, replays, 2).solved) << e.name << " accepts replayed answers";
    const Ask repeats = [&](const auto&) { return before[0]; };
    EXPECT_FALSE(grade(e, repeats, 1).solved) << e.name << " accepts its first answer for all requests";
    const Ask cuts = [&](const auto& local) { return local().substr(8); };
    EXPECT_FALSE(grade(e, cuts, 1).solved) << e.name;
    const Ask clears = [&](const auto& local) {
      std::string right = local();
      return right.replace(right.size() / 2, right.size(), right.size() - right.size() / 2, '\0');
    };
    EXPECT_FALSE(grade(e, clears, 1).solved) << e.name;
  }
}

}  // namespace
}  // namespace tessera::lab
