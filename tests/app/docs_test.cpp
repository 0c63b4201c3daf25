// Holds the pages to the programs: what a page says that a command prints is what it prints, code that a page quotes is
// the code of its file, and links lead to files.
//
//   ```console
//   $ ./tessera verify --ranks 4
//   ```
//   ```
//   what it printed
//   ```
//
// The commands are `./tessera verify`, `./tessera lab`, `./tessera plan` (of whose output, and of `verify --defect`, a
// page may leave out lines, as `...`),
// `./tessera data SOURCE --out FOLDER`, `./tessera report RUN --format text`, `build/release/bin/schedules`, and `cat
// FILE`, whose block becomes that file for the page's later commands; `./tessera train --trace` is run for a report and
// has no block of output, nor has `./tessera report --figure NAME --svg --out FILE`: that file is in the repository,
// and the page shows it. Of a plan it is compared byte by byte, of a run by its structure; so is memory, of which
// closed forms count. Of a block of C++ that begins with a line `// path`, all other lines stand together in that file.
//
// Spaces do not count, numbers do; but a loss may be 0.01 away and a peak of memory 10%, and the rounding of sums may
// be anything, since processors multiply matrices in different ways; oneDNN, whose working memory differs most, is held
// to AVX2, as the pages were made. Of a report, whatever is a time may be anything: ms, the lengths in pictures, and
// the bubbles that follow from them; what is planned, sent and held may not. It is made on two processors, since it
// says so where there are fewer than ranks. TESSERA_UPDATE_DOCS=1 writes what is printed into the pages instead.

#include "tests/app/docs_pages.h"
#include "tests/app/program.h"
#include "tests/support/draw.h"

namespace tessera {
namespace {

using test::Difference;
using test::Example;
using test::examples_of;
using test::Lines;
using test::lines_of;
using test::OnTwoProcessors;
using test::quotes_of;

std::vector<std::filesystem::path> pages() {
  const std::filesystem::path root = TESSERA_SOURCE_DIR;
  std::vector<std::filesystem::path> out = {root / "README.md"};
  for (const auto& entry : std::filesystem::recursive_directory_iterator(root / "docs"))
    if (entry.path().extension() == ".md") out.push_back(entry.path());
  std::sort(out.begin(), out.end());
  return out;
}

std::string name_of(const std::filesystem::path& page) {
  return page.lexically_relative(TESSERA_SOURCE_DIR).generic_string();
}

// Where the links of a page lead, with their lines; not those to other sites, nor within the page.
std::vector<std::pair<std::string, size_t>> links_of(const Lines& page) {
  static const std::regex link(R"(\]\(([^)#\s]+)[^)]*\))"), code("`[^`]*`");
  std::vector<std::pair<std::string, size_t>> out;
  bool fenced = false;
  for (size_t i = 0; i < page.size(); ++i) {
    if (test::is_fence(page[i])) fenced = !fenced;
    if (fenced) continue;
    const std::string text = std::regex_replace(page[i], code, "");
    for (std::sregex_iterator it(text.begin(), text.end(), link), end; it != end; ++it)
      if (const std::string target = (*it)[1]; target.find(':') == std::string::npos) out.emplace_back(target, i + 1);
  }
  return out;
}

class DocsTest : public test::ProgramTest {
 protected:
  // Pages train on the README, so that their commands work where it lies.
  DocsTest() {
    std::filesystem::copy_file(std::filesystem::path(TESSERA_SOURCE_DIR) / "README.md", path("README.md"));
    std::filesystem::create_directories(path("docs/strategies/figures"));
    setenv("DNNL_MAX_CPU_ISA", "AVX2", 1);
    setenv("TESSERA_AMX", "0", 1);
  }
  ~DocsTest() override {
    unsetenv("DNNL_MAX_CPU_ISA");
    unsetenv("TESSERA_AMX");
  }
  // The file of a figure that the page shows is as the example has drawn it.
  void check_figure(const Example& e, const std::filesystem::path& page, const Lines& text, bool update) const {
    const std::filesystem::path kept = std::filesystem::path(TESSERA_SOURCE_DIR) / e.figure();
    const std::string shown = "](" + kept.lexically_relative(page.parent_path()).generic_string() + ")";
    EXPECT_TRUE(std::ranges::any_of(text, [&](const std::string& line) { return line.find(shown) != line.npos; }))
        << name_of(page) << " does not show " << e.figure();
    const std::string made = read_file(path(e.figure())), before = std::filesystem::exists(kept) ? read_file(kept) : "";
    const bool planned =
        e.arguments.starts_with("report --") && e.arguments.find("--figure memory") == std::string::npos;
    const auto [left, right] = std::pair(test::structure_of(before), test::structure_of(made));
    if (planned ? made == before : left == right) return;
    if (update) {
      write_file(kept, made);
      return;
    }
    if (!planned && !OnTwoProcessors().are_there()) return;
    ADD_FAILURE() << e.figure() << " is not what tessera " << e.arguments << " draws";
    for (const auto& [part, times] : left)
      if (const auto found = right.find(part); found == right.end() || found->second != times)
        ADD_FAILURE() << times << " times " << part << ", now " << (found == right.end() ? 0 : found->second);
  }

  // The output of the example; `shown` is the page's version of it.
  Lines printed(const Example& e, const Lines& shown) const {
    if (e.program == "cat") {
      std::ofstream file(path(e.arguments));
      for (const std::string& line : shown) file << line << '\n';
      return shown;
    }
    const OnTwoProcessors two;
    const std::filesystem::path beside = std::filesystem::path(TESSERA_BINARY).parent_path() / e.program;
    const test::Ran r = run_program(beside.string(), e.arguments);
    if (!e.shows()) {
      EXPECT_EQ(r.status, 0) << e.arguments << ": " << r.err;
    }
    const Lines all = lines_of(r.out + r.err);
    return e.leaves_out() ? test::left_out(shown, all) : all;
  }
};

TEST_F(DocsTest, PagesShowWhatIsPrinted) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "many times slower with sanitizers, and tests/verify runs the same there";
#endif
  const bool update = std::getenv("TESSERA_UPDATE_DOCS") != nullptr;
  size_t count = 0, number = 0;
  for (const std::filesystem::path& page : pages()) {
    if (!test::is_drawn(number++, 3)) continue;
    Lines text = lines_of(read_file(page));
    std::vector<Example> examples;
    ASSERT_NO_THROW(examples = examples_of(text)) << name_of(page);
    count += examples.size();
    std::vector<Lines> found;
    size_t figures = 0;
    for (const Example& e : examples) {
      const Lines shown(text.begin() + static_cast<std::ptrdiff_t>(e.begin),
                        text.begin() + static_cast<std::ptrdiff_t>(e.end));
      found.push_back(printed(e, shown));
      if (!e.figure().empty()) check_figure(e, page, text, update), ++figures;
      if (update || !e.shows() || (e.is_report() && !OnTwoProcessors().are_there())) continue;
      if (const std::string wrong = Difference(e.is_report()).between(shown, found.back(), e.begin + 1); !wrong.empty())
        ADD_FAILURE() << name_of(page) << ":" << wrong << "\nby " << e.program << " " << e.arguments;
    }
    if (page.parent_path().filename() == "strategies") {
      EXPECT_GE(figures, 1U) << name_of(page) << " shows no figure";
    }
    if (!update) continue;
    for (size_t i = examples.size(); i-- > 0;) {  // from the end, since lines move
      if (!examples[i].shows()) continue;
      const auto begin = text.begin() + static_cast<std::ptrdiff_t>(examples[i].begin),
                 end = text.begin() + static_cast<std::ptrdiff_t>(examples[i].end);
      text.insert(text.erase(begin, end), found[i].begin(), found[i].end());
    }
    std::ofstream out(page);
    for (const std::string& line : text) out << line << '\n';
  }
  EXPECT_GE(count, 4U);
}

TEST(Docs, QuotedCodeIsInItsFile) {
  size_t count = 0;
  for (const std::filesystem::path& page : pages())
    for (const auto& [file, lines] : quotes_of(lines_of(read_file(page)))) {
      ++count;
      const std::filesystem::path path = std::filesystem::path(TESSERA_SOURCE_DIR) / file;
      ASSERT_TRUE(std::filesystem::exists(path)) << name_of(page) << ": there is no " << file;
      const Lines code = lines_of(read_file(path));
      EXPECT_NE(std::search(code.begin(), code.end(), lines.begin(), lines.end()), code.end())
          << name_of(page) << ": " << file << " has not these lines any more:\n"
          << fmt::format("{}", fmt::join(lines, "\n"));
    }
  EXPECT_GE(count, 1U);
}

TEST(Docs, LinksLeadToFiles) {
  size_t count = 0;
  for (const std::filesystem::path& page : pages())
    for (const auto& [target, line] : links_of(lines_of(read_file(page)))) {
      ++count;
      EXPECT_TRUE(std::filesystem::exists(page.parent_path() / target))
          << name_of(page) << ":" << line << ": there is no " << target;
    }
  EXPECT_GE(count, 8U);
}

TEST(Docs, DifferencesAreSeen) {
  const Lines page = lines_of("text\n```console\n$ ./tessera verify --ranks 2\n```\n\n```\na  1\n```\nmore\n");
  const std::vector<Example> examples = examples_of(page);
  ASSERT_EQ(examples.size(), 1U);
  EXPECT_EQ(examples[0].program, "tessera");
  EXPECT_EQ(examples[0].arguments, "verify --ranks 2");
  EXPECT_EQ(examples[0].begin, 6U);
  EXPECT_EQ(examples[0].end, 7U);
  EXPECT_TRUE(examples_of({"```console", "$ ls", "```"}).empty());
  EXPECT_TRUE(examples_of({"```console", "$ ./tessera train", "```"}).empty());
  EXPECT_EQ(examples_of({"```console", "$ cat a.txt", "```", "```", "text", "```"}).at(0).program, "cat");
  EXPECT_EQ(examples_of({"```console", "$ build/release/bin/schedules 4 8", "```", "```", "```"}).at(0).arguments,
            "4 8");
  EXPECT_EQ(quotes_of({"```cpp", "// nn/a.h", "int b;", "```", "```cpp", "int c;", "```"}),
            (std::vector<std::pair<std::string, Lines>>{{"nn/a.h", {"int b;"}}}));
  EXPECT_THROW(examples_of({"```console", "$ tessera verify", "```", "text"}), std::runtime_error);
  EXPECT_THROW(examples_of({"```console", "$ tessera verify", "$ ls", "```", "```", "```"}), std::runtime_error);
  const auto same = [](const Lines& a, const Lines& b) { return Difference().between(a, b, 1).empty(); };
  EXPECT_TRUE(same({"dp  1920 ok"}, {"  dp 1920  ok"}));
  EXPECT_FALSE(same({"dp 1920 ok"}, {"dp 1921 ok"}));
  EXPECT_FALSE(same({"a", "b"}, {"a"}));
  EXPECT_TRUE(same({"loss 4.1799 -> 2.8294; same"}, {"loss 4.1802 -> 2.8301; same"}));
  EXPECT_FALSE(same({"loss 4.1799 -> 2.8294; same"}, {"loss 4.1799 -> 2.8494; same"}));
  EXPECT_TRUE(same({"rank held peak", "0 100 1000 ok"}, {"rank held peak", "0 100 1090 ok"}));
  EXPECT_TRUE(same({"rank held peak bound bytes", "0 100 ok 1000 900 ok"},
                   {"rank held peak bound bytes", "0 100 ok 1090 950 ok"}));
  EXPECT_FALSE(
      same({"rank held peak bound bytes", "0 100 ok 1000 ok"}, {"rank held peak bound bytes", "0 101 ok 1000 ok"}));
  EXPECT_FALSE(same({"rank held peak", "0 100 ok 1000"}, {"rank held peak", "0 100 WRONG 1000"}));
  EXPECT_TRUE(same({"relative: loss 1e-9, all 1e-6 (norm.bias)"}, {"relative: loss 0, all 2e-6 (tokens.weight)"}));
  EXPECT_TRUE(same({"bound 1e-6; the rest: same"}, {"bound 2e-6; the rest: same"}));
  EXPECT_FALSE(same({"bound 1e-6; the rest: same"}, {"bound 1e-6; the rest: differs"}));
  EXPECT_FALSE(same({"rank held peak", "0 100 1000 ok"}, {"rank held peak", "0 100 1200 ok"}));
  EXPECT_FALSE(same({"rank held peak", "0 100 1000 ok"}, {"rank held peak", "0 101 1000 ok"}));
}

TEST(Docs, DifferencesOfReportsAreSeen) {
  const std::vector<Example> examples =
      examples_of({"```console", "$ ./tessera train --pp 2 --trace --out runs/a", "```", "text", "```console",
                   "$ ./tessera report runs/a --format text", "```", "```", "out", "```"});
  ASSERT_EQ(examples.size(), 2U);
  EXPECT_FALSE(examples[0].shows());
  EXPECT_TRUE(examples[1].shows() && examples[1].is_report());
  EXPECT_EQ(examples[1].begin, 8U);
  EXPECT_TRUE(examples_of({"```console", "$ ./tessera report runs/a", "```"}).empty());
  const Lines page = {"```console", "$ ./tessera report runs/a --figure timeline --svg --out a.svg", "```", "text"};
  ASSERT_EQ(examples_of(page).size(), 1U);
  EXPECT_EQ(examples_of(page)[0].figure(), "a.svg");
  EXPECT_FALSE(examples_of(page)[0].shows());
  const auto structure = [](const std::string& part) { return test::structure_of("<svg>\n" + part + "</svg>"); };
  EXPECT_EQ(structure("<rect class=\"k-F\" x=\"1\"><title>0F0, forward, from 1 ms</title></rect>"),
            structure("<rect class=\"k-F\" x=\"2\"><title>0F0, forward, from 3.5 ms</title></rect>"));
  EXPECT_NE(structure("<rect class=\"k-F\" x=\"1\"><title>0F0, forward, x</title></rect>"), structure(""));
  EXPECT_NE(structure("<text class=\"end\" x=\"1\">computing</text>"),
            structure("<text class=\"end\" x=\"1\">dp</text>"));
  EXPECT_NE(structure(".k-F { fill: #123456; }\n"), structure(".k-F { fill: #123457; }\n"));
  const auto same = [](const Lines& a, const Lines& b) { return Difference(true).between(a, b, 1).empty(); };
  EXPECT_TRUE(same({"step 7, the median of 9, took 1.234 ms"}, {"step 8, the median of 9, took 12.345 ms"}));
  EXPECT_FALSE(same({"step 7, the median of 9, took 1.234 ms"}, {"step 8, the median of 8, took 1.234 ms"}));
  EXPECT_TRUE(same({"measured 20.1%"}, {"measured 30.4%"}));
  EXPECT_FALSE(same({"measured 20.1%"}, {"measured null"}));
  EXPECT_FALSE(same({"planned 20.1%"}, {"planned 30.4%"}));
  EXPECT_FALSE(same({"rank 0 |FF.|"}, {"rank 0 |...|"}));
  EXPECT_TRUE(same({"       |.C.|"}, {"       |...|"}));
  EXPECT_FALSE(same({"       |.C.|"}, {"       |..|"}));
  EXPECT_FALSE(same({"formula 20.1%"}, {"formula 30.4%"}));
  EXPECT_TRUE(same({"measured: it", "rank 0 |F0-B0-..|"}, {"measured: it", "rank 0 |F0-..B0-|"}));
  EXPECT_FALSE(same({"measured: it", "rank 0 |F0-B0-..|"}, {"measured: it", "rank 0 |F0-..B0|"}));
  EXPECT_FALSE(same({"measured: it", "rank 0 |F0-B0-..|"}, {"measured: it", "rank 1 |F0-B0-..|"}));
  EXPECT_FALSE(same({"measured: it", "rank 0 |F0-B0-..|"}, {"measured: it", "rank 0 |........|"}));
  EXPECT_FALSE(same({"planned: it", "rank 0 |F0-B0-..|"}, {"planned: it", "rank 0 |F0-..B0-|"}));
  EXPECT_TRUE(same({"pp send 8 4096 1.234 99"}, {"pp send 8 4096 0.034 99"}));
  EXPECT_FALSE(same({"pp send 8 4096 1.234 99"}, {"pp send 8 4095 1.234 99"}));
  EXPECT_TRUE(same({"rank parameters peak", "0 100 1000000"}, {"rank parameters peak", "0 100 1050000"}));
  EXPECT_FALSE(same({"rank parameters peak", "0 100 1000000"}, {"rank parameters peak", "0 101 1000000"}));
}

TEST(Docs, LinesMayBeLeftOut) {
  const Lines found = {"a 1", "b 2", "- x 1", "- y 2", "end"};
  EXPECT_EQ(test::left_out({"a 1", "...", "- y 2", "..."}, found), (Lines{"a 1", "...", "- y 2", "..."}));
  EXPECT_EQ(test::left_out({"a 1", "...", "- y 3", "..."}, found), (Lines{"a 1", "...", "- y 2", "..."}));
  EXPECT_EQ(test::left_out({"...", "- z 2", "end"}, found), (Lines{"..."}));
  EXPECT_EQ(test::left_out({"a 1", "..."}, found), (Lines{"a 1", "..."}));
  EXPECT_EQ(test::left_out({"a 1", "b 2"}, found), found);
}

TEST(Docs, LinksAreFound) {
  const auto links =
      links_of({"[a](b.md) `[c](d.md)` [e](f.md#g)", "```", "[h](i.md)", "```", "[j](https://k) [l](#m)"});
  ASSERT_EQ(links.size(), 2U);
  EXPECT_EQ(links[0].first, "b.md");
  EXPECT_EQ(links[1].first, "f.md");
}

}  // namespace
}  // namespace tessera
