// Fakes: files that do not solve an exercise and would like to be taken for a solution, or to do harm.
//
// Each is handed in as exercise 7, whose file is compiled quickly; a few of them for each other exercise too, as
// TESSERA_DRAW draws (TESSERA_LAB=all: all of them).
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <atomic>
#include <cstdlib>
#include <future>

#include "data/files.h"
#include "lab/check.h"

namespace tessera::lab {
namespace {

namespace fs = std::filesystem;

struct Fake {
  const char *name, *broke, *text;
  bool any = false;  // its text does not depend on the exercise
};

// The text behind the word ANSWERS: a function that returns lists without actions.
const std::string kWrong =
    "\nnamespace tessera {\nSchedule one_f_one_b(int ranks, int microbatches) {\n"
    "  return empty_schedule(\"1f1b\", ranks, 1, microbatches);\n}\n}\n";
const std::string kIncludes =
    "#include <fcntl.h>\n#include <signal.h>\n#include <stdio.h>\n#include <stdlib.h>\n#include <sys/mman.h>\n"
    "#include <sys/socket.h>\n#include <unistd.h>\n#include <algorithm>\n#include <thread>\n"
    "#include \"parallel/pipeline/schedules.h\"\nusing namespace tessera;\n";

constexpr Fake kFakes[] = {
    {"is empty", "linker", "", true},
    {"includes the product's file", "copy", "#include \"FILE\"\n", true},
    {"includes a link to the product's file", "copy", "#include \"linked.inc\"\n", true},
    {"says solved and ends well", "exit",
     "INCLUDES static const int now = (puts(\"exercise 7, 1f1b: solved\"), fflush(stdout), _exit(0), 0); ANSWERS"},
    {"says solved and ends with 1", "exit",
     "INCLUDES static const int now = (puts(\"exercise 7, 1f1b: solved\"), fflush(stdout), _exit(1), 0); ANSWERS"},
    {"ends its parent, its group and all processes", "schedule",
     "INCLUDES static const int now = kill(getppid(), SIGKILL) + kill(0, SIGKILL) + kill(-1, SIGKILL); ANSWERS"},
    {"writes to all descriptors", "answer",
     "INCLUDES static const int now = [] { for (int i = 0; i < 64; ++i) write(i, \"exercise 7, 1f1b: solved\\n\", 25); "
     "return 0; }(); ANSWERS"},
    {"closes all descriptors", "answer",
     "INCLUDES static const int now = [] { for (int i = 0; i < 64; ++i) close(i); pause(); return 0; }(); ANSWERS"},
    {"answers before it is asked", "answer",
     "INCLUDES static const int now = [] { char all[4096] = {}; send(3, all, sizeof(all), 0); return 0; }(); ANSWERS"},
    {"echoes the question", "error",
     "INCLUDES static const int now = [] { unsigned long a[3] = {0, 8, 0}; recv(3, a, 8, MSG_WAITALL); while (recv(3, "
     "a, 8, MSG_WAITALL) == 8) send(3, a, 24, 0); _exit(0); return 0; }(); ANSWERS"},
    {"lets a child answer, which keeps the channel", "schedule",
     "INCLUDES static const int now = [] { if (fork() == 0) for (;;) pause(); return 0; }(); ANSWERS"},
    {"lets a thread live on", "exit",
     "INCLUDES static const int now = [] { std::thread([] { pause(); }).detach(); _exit(0); return 0; }(); ANSWERS"},
    {"lets the product answer", "schedule",
     "INCLUDES static const int now = [] { char name[64]; sprintf(name, \"/proc/%d/exe\", getppid()); "
     "return execl(name, \"tessera\", \"lab\", \"answer\", \"7\", nullptr); }(); ANSWERS"},
    {"returns a constant", "schedule",
     "INCLUDES namespace tessera { Schedule one_f_one_b(int, int) { Schedule s = empty_schedule(\"1f1b\", 3, 1, 1); "
     "for (int r = 0; r < 3; ++r) s.actions[size_t(r)] = {{Do::F, r, 0}, {Do::B, r, 0}}; return s; } }"},
    {"replays its first answer", "schedule",
     "INCLUDES namespace tessera { Schedule one_f_one_b(int p, int m) { static const Schedule first = [&] { Schedule s "
     "= "
     "empty_schedule(\"1f1b\", p, 1, m); for (int r = 0; r < p; ++r) { auto& to = s.actions[size_t(r)]; const int w = "
     "std::min(p - 1 - r, m); for (int i = 0; i < w + m; ++i) { if (i < m) to.push_back({Do::F, r, i}); if (i >= w) "
     "to.push_back({Do::B, r, i - w}); } } return s; }(); return first; } }"},
    {"sleeps for ever", "time", "INCLUDES static const int now = pause(); ANSWERS"},
    {"takes all memory", "memory",
     "INCLUDES namespace tessera { Schedule one_f_one_b(int, int) { std::vector<std::vector<char>> all; for (;;) "
     "all.emplace_back(1 << 26, 'x'); } }"},
    {"prints a gigabyte", "schedule",
     "INCLUDES static const int now = [] { static char all[1 << 20]; for (int i = 0; i < 1024; ++i) write(1, all, "
     "sizeof(all)); return 0; }(); ANSWERS"},
    {"throws 42", "error", "INCLUDES namespace tessera { Schedule one_f_one_b(int, int) { throw 42; } }"},
    {"throws the words of a verdict", "error",
     "INCLUDES #include <stdexcept>\nnamespace tessera { Schedule one_f_one_b(int, int) { throw "
     "std::runtime_error(\"\\x1b[2Jexercise 7, 1f1b: solved\\nexercise 7, 1f1b: solved\"); } }"},
    {"is weak", "schedule",
     "INCLUDES namespace tessera { __attribute__((weak)) Schedule one_f_one_b(int p, int m) { return "
     "empty_schedule(\"1f1b\", p, 1, m); } }"},
    {"is static", "linker",
     "#include \"parallel/pipeline/schedule.h\"\nnamespace tessera { static Schedule one_f_one_b(int p, int m) { "
     "return "
     "empty_schedule(\"1f1b\", p, 1, m); } }"},
    {"has other parameters", "linker",
     "INCLUDES namespace tessera { Schedule one_f_one_b(int p) { return empty_schedule(\"1f1b\", p, 1, 1); } }"},
    {"ends when it is destroyed", "schedule",
     "INCLUDES struct Last { ~Last() { puts(\"exercise 7, 1f1b: solved\"); _exit(0); } } last; ANSWERS"},
    {"has an operator new that ends all", "exit",
     "INCLUDES static bool ready; void* operator new(size_t n) { if (ready) _exit(0); return malloc(n); } namespace "
     "tessera { Schedule one_f_one_b(int p, int m) { ready = true; return empty_schedule(\"1f1b\", p, 1, m); } }"},
    {"has a main of its own", "linker",
     "INCLUDES int main() { puts(\"exercise 7, 1f1b: solved\"); return 0; } ANSWERS"},
    {"writes and removes files", "schedule",
     "INCLUDES static const int now = creat(\"FOLDER/made\", 0666) + open(\"FOLDER/made\", O_CREAT | O_WRONLY, 0666) + "
     "unlink(\"FOLDER/kept\") + rename(\"FOLDER/kept\", \"FOLDER/made\"); ANSWERS"},
};

// Nothing, where the fake is refused for its reason and has done no harm.
std::string refused_fake(const Exercise& e, const Fake& fake) {
  const TemporaryDirectory folder(temporary_folder() / "tessera-fake");
  std::string text = fake.text;
  const std::vector<std::pair<std::string, std::string>> words{
      {"INCLUDES ", kIncludes}, {"ANSWERS", kWrong}, {"FOLDER", folder.path().string()}, {"FILE", std::string(e.file)}};
  for (const auto& [from, to] : words)
    while (text.find(from) != std::string::npos) text.replace(text.find(from), from.size(), to);
  write_file(folder.path() / fs::path(e.file).filename(), text);
  write_file(folder.path() / "kept", "");
  fs::create_symlink(fs::path(TESSERA_SOURCE_DIR) / e.file, folder.path() / "linked.inc");
  const Verdict verdict = check(e, folder.path());
  const std::string first = fmt::format("exercise {}, {}: not yet\n  broke  {}\n", e.number, e.name, fake.broke);
  const bool sound = !verdict.solved && verdict.kept == 0 && verdict.text.starts_with(first) &&
                     verdict.text.find('\x1b') == std::string::npos &&
                     verdict.text.find("\nexercise") == verdict.text.npos;
  const bool harmless = fs::exists(folder.path() / "kept") && !fs::exists(folder.path() / "made") &&
                        (!fs::exists(folder.path() / "build/output.txt") ||
                         fs::file_size(folder.path() / "build/output.txt") <= uintmax_t{1} << 20);
  if (std::getenv("TESSERA_LAB_SHOW")) fmt::print("--- {} {}\n{}", e.name, fake.name, verdict.text);
  return sound && harmless ? ""
                           : fmt::format("{}, which {}: expected '{}'{}, found\n{}", e.name, fake.name, first,
                                         harmless ? "" : " and no harm", verdict.text);
}

TEST(Fakes, AreRefused) {
  std::vector<std::pair<const Exercise*, const Fake*>> all;
  const char *only = std::getenv("TESSERA_LAB"), *draw = std::getenv("TESSERA_DRAW");
  size_t number = draw ? std::stoull(draw) : 0;
  for (const Exercise& e : exercises())
    for (const Fake& fake : kFakes)
      if (e.name == "1f1b" || (fake.any && (only || number++ % 6 == 0))) all.emplace_back(&e, &fake);
  std::atomic<size_t> next = 0;
  const auto work = [&] {
    std::string wrong;
    for (size_t mine; (mine = next++) < all.size();) wrong += refused_fake(*all[mine].first, *all[mine].second);
    return wrong;
  };
  std::future<std::string> other = std::async(std::launch::async, work);
  EXPECT_EQ(work(), "");
  EXPECT_EQ(other.get(), "");
}

// Bytes of one kind, whatever is asked.
TEST(Fakes, NoGraderTakesWhatIsNoAnswer) {
  for (const Exercise& e : exercises())
    for (const size_t size : {0, 8, 64, 4096, 100000})
      for (const char byte : {'\0', '\1', '\x7f', '\xff'}) {
        const Verdict verdict = grade(
            e, [&](const auto&) { return std::string(size, byte); }, 1);
        EXPECT_FALSE(verdict.solved) << e.name;
        EXPECT_EQ(verdict.kept, 0U) << e.name;
      }
}

// Answers of the product that were given before, are cut short, have zeros in their second half, or are of another
// seed.
TEST(Fakes, OldAndCutAnswersAreRefused) {
  for (const Exercise& e : exercises()) {
    std::vector<std::string> before;
    const Ask records = [&](const auto& local) { return before.emplace_back(local()); };
    EXPECT_TRUE(grade(e, records, 1).solved) << e.name;
    size_t asked = 0;
    const Ask replays = [&](const auto&) { return before.at(asked++ % before.size()); };
    EXPECT_FALSE(grade(e, replays, 2).solved) << e.name << " takes what was right the last time";
    const Ask repeats = [&](const auto&) { return before[0]; };
    EXPECT_FALSE(grade(e, repeats, 1).solved) << e.name << " takes its first answer for all others";
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
